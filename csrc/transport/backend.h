#pragma once

#include "transport/staging.h"
#include "transport/transport.h"
#include "transport/worker.h"

#include <shardwise/detail/export.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace shardwise::transport {

/// A c10d back end. An Exchange carries out all-gathers, reduce-scatters and all-reduces (sums and means), adding in a
/// fixed order, so that every run gives the same bits. Everything else is handed to Gloo.
///
/// Collectives run in the order in which they are issued, Gloo's too. Ranks first compare their calls: if they differ,
/// every rank gets an error that names both calls, and the group stays usable. If a rank dies or misses the timeout,
/// the error names it, and the group can send nothing more. The program's own sends and receives go straight to Gloo,
/// with tags below 2^30.
///
/// Tensors of devices go through the host's memory: for processes that share a GPU, or have no NCCL. As with Gloo, a
/// collective then comes after what the current stream has, and wait() blocks the host until what comes is there; then
/// the current stream waits for the copies. Sends and receives block the host.
class SHARDWISE_API Backend final : public c10d::Backend {
 public:
  /// The exchange uses the carrier. `transport_name` says how it carries out collectives: "shared memory" or "TCP".
  /// `group` is an id of this process group: the same on all its ranks, different from every other group's.
  Backend(
      std::unique_ptr<Carrier> carrier, std::unique_ptr<Exchange> exchange, std::chrono::milliseconds timeout,
      std::string transport_name, uint64_t group);

  const std::string getBackendName() const override {
    return "shardwise";
  }
  const std::string& transport_name() const {
    return transport_name_;
  }
  /// Bytes this transport has sent to `peer` over TCP in collectives so far.
  uint64_t sent_to(int peer) const;
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return issued_.count();
  }
  void abort() override;
  void shutdown() override;

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

 private:
  WorkPtr issue(c10d::OpType type, const char* title, const Tensors& seen, DirectWork::Run run);
  /// Compares the ranks' calls, then runs the collective on Gloo.
  using Start = std::function<WorkPtr(c10d::Backend& gloo)>;
  WorkPtr run_on_gloo(c10d::OpType type, const char* title, const Tensors& seen, const Call& call, Start start);
  /// What is issued from now on does not begin before `ready` has returned, which waits on the worker's thread. If it
  /// raises, this process group has failed.
  void begin_after(std::function<void()> ready);
  /// The tensor of a collective that takes one per rank. Raises c10::ValueError for another number.
  static const at::Tensor& only(const Tensors& tensors, const char* collective);
  std::chrono::milliseconds time(std::chrono::milliseconds given) const;
  /// A call with this tensor's dtype and elements.
  Call call_of(
      Kind kind, const at::Tensor& tensor, std::chrono::milliseconds timeout,
      c10d::ReduceOp::RedOpType op = c10d::ReduceOp::UNUSED, int64_t root = -1) const;

  /// Starts it with the tensors themselves if they are on the host, else with copies.
  template <typename Output, typename Input, typename Run>
  WorkPtr pass(c10d::OpType type, Output& output, Input& input, const Run& run) {
    if (on_host(output) && on_host(input)) return run(output, input);
    return stage(type, all_of(input), all_of(output), [&](const Staging::Copies& copies) {
      auto out = copies.of(output);
      auto in = copies.of(input);
      return run(out, in);
    });
  }
  template <typename Tensor, typename Run>
  WorkPtr pass(c10d::OpType type, Tensor& tensors, const Run& run) {
    return pass(type, tensors, tensors, [&](auto& own, auto& /*same*/) { return run(own); });
  }
  WorkPtr stage(
      c10d::OpType type, const Tensors& reads, const Tensors& writes,
      c10::function_ref<WorkPtr(const Staging::Copies& copies)> start);

  std::atomic<std::chrono::milliseconds> timeout_;
  const std::string transport_name_;
  IssueCount issued_;
  Worker worker_;
  std::mutex mutex_;
  std::unordered_map<c10::Device, Staging> stagings_;
};

} // namespace shardwise::transport
