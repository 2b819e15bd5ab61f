#pragma once

#include "transport/backend.h"
#include "transport/staging.h"

#include <memory>
#include <mutex>
#include <vector>

namespace shardwise::transport {

/// A Backend that takes tensors of devices too, through the host's memory: for processes that share a GPU, or have no
/// NCCL. As with Gloo, a collective comes after what the current stream has, and wait() blocks the host until what
/// comes is there; then the current stream waits for the copies. Sends and receives block the host.
///
/// Collectives of all tensors, wherever they are, run in the order in which they are issued.
class StagedBackend final : public Backend {
 public:
  using Backend::Backend;

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

  Works broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Works reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Works gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Works scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  Works alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override;
  Works allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;

  Works send(Tensors& tensors, int to, int tag) override;
  Works recv(Tensors& tensors, int from, int tag) override;
  Works recvAnysource(Tensors& tensors, int tag) override;

 private:
  /// Starts it with the tensors themselves if they are on the host, else with copies.
  template <typename Output, typename Input, typename Call>
  Works pass(c10d::OpType type, Output& output, Input& input, const Call& call);
  using Start = std::function<Works(const Staging::Copies& copies)>;
  Works stage(c10d::OpType type, const Tensors& reads, const Tensors& writes, Start start);

  std::mutex mutex_;
  std::vector<std::pair<c10::Device, std::unique_ptr<Staging>>> stagings_;
};

} // namespace shardwise::transport
