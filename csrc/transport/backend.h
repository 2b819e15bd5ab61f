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

/// A c10d back end for CPU tensors; StagedBackend takes others too. An Exchange carries out all-gathers,
/// reduce-scatters and all-reduces (sums and means), adding in a fixed order, so that every run gives the same bits.
/// Everything else is handed to Gloo.
///
/// Collectives run in the order in which they are issued, Gloo's too. Ranks first compare their calls: if they differ,
/// every rank gets an error that names both calls, and the group stays usable. If a rank dies or misses the timeout,
/// the error names it, and the group can send nothing more. The program's own sends and receives go straight to Gloo,
/// with tags below 2^30.
class SHARDWISE_API Backend : public c10d::Backend {
 public:
  struct Traits {
    /// How the collectives are carried out: "shared memory" or "TCP".
    std::string way;
    /// An id of this process group: the same on all its ranks, different from every other group's.
    uint64_t group = 0;
    /// The rank numbers that errors show; if empty, positions in the group.
    std::vector<int64_t> names;
  };
  /// Takes over `gloo`: nobody else may use it from now on. `make` creates the Exchange.
  Backend(
      c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds timeout, const MakeExchange& make,
      Traits traits);

  const std::string getBackendName() const override {
    return "shardwise";
  }
  const std::string& way() const {
    return way_;
  }
  /// Bytes this transport has sent to `peer` over TCP in collectives so far.
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

 protected:
  /// What is issued from now on does not begin before `ready` has returned, which waits on the worker's thread. If it
  /// raises, this process group has failed.
  void begin_after(std::function<void()> ready);

 private:
  Works issue(c10d::OpType type, const char* title, const Tensors& seen, DirectWork::Run run);
  /// Compares the ranks' calls, then runs the collective on Gloo.
  using Start = std::function<Works(c10d::Backend& gloo)>;
  Works hand_over(c10d::OpType type, const char* title, const Tensors& seen, const Call& call, Start start);
  std::chrono::milliseconds time(std::chrono::milliseconds given) const;

  std::atomic<std::chrono::milliseconds> timeout_;
  const std::string way_;
  IssueCount issued_;
  Worker worker_;
};

} // namespace shardwise::transport
