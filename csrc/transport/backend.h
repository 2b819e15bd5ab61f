#pragma once

#include "transport/issue_count.h"
#include "transport/worker.h"

#include <shardwise/export.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace shardwise::transport {

/// A back end for CPU tensors: all-gathers, reduce-scatters and all-reduces (sums and means) by an Exchange, with sums
/// in the order of the ranks: the same bits in every run. What it does not do itself it hands to Gloo.
///
/// Collectives are carried out in the order in which they are issued, whoever does it. Ranks first compare what they
/// call: if they differ, all get an error with both ways, and may go on. A rank that is late beyond the timeout or gone
/// is named; then nothing more can be sent. Sends and receives of users go to Gloo at once, with tags below 2^30.
class SHARDWISE_API Backend final : public c10d::Backend {
 public:
  struct Traits {
    /// How the collectives are carried out: "shared memory" or "TCP".
    std::string way;
    /// The same number on all ranks of this process group, and no other's.
    uint64_t group = 0;
    /// What errors call the ranks; empty: by their positions.
    std::vector<int64_t> names;
  };
  /// Nobody else may use `gloo` from here on. What `make` gives carries out the collectives.
  Backend(
      c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds timeout, const MakeExchange& make,
      Traits traits);

  const std::string getBackendName() const override {
    return "shardwise";
  }
  const std::string& way() const {
    return way_;
  }
  /// Bytes of collectives that this transport sent to a peer over TCP so far.
  uint64_t sent_to(int peer) const;
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return worker_.issued();
  }
  void abort() override;
  void shutdown() override;

  using Works = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;

  Works allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Works allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Works _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Works allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Works allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Works _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  Works reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  Works reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  Works barrier(const c10d::BarrierOptions& options) override;

  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Works gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Works scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  Works alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override;
  Works allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Works allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  Works send(Tensors& tensors, int to, int tag) override;
  Works recv(Tensors& tensors, int from, int tag) override;
  Works recvAnysource(Tensors& tensors, int tag) override;

 private:
  Works issue(c10d::OpType type, const char* title, const Tensors& seen, DirectWork::Run run);
  /// Compares the calls, then lets Gloo carry it out.
  using Start = std::function<Works(c10d::Backend& gloo)>;
  Works hand_over(c10d::OpType type, const char* title, const Tensors& seen, const Call& call, Start start);
  std::chrono::milliseconds time(std::chrono::milliseconds given) const;

  std::atomic<std::chrono::milliseconds> timeout_;
  const std::string way_;
  IssueCount issued_;
  Worker worker_;
};

} // namespace shardwise::transport
