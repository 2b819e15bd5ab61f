#pragma once

#include "communicator.h"
#include "device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace late {

/// A back end of process groups with NCCL's rules, for ranks that are threads of one process and have a device each.
/// A collective starts after what the current stream has at the call, runs on a stream of its communicator, and its
/// wait() makes the current stream wait, not the host. Collectives of one communicator run in order. Memory must live
/// until the end: nothing is kept, and nothing is recorded on the stream.
class Group final : public c10d::Backend {
 public:
  Group(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const at::Device& device,
      std::chrono::milliseconds timeout);
  ~Group() override;

  const std::string getBackendName() const override {
    return "late";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  void abort() override;
  void shutdown() override;

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;

 private:
  /// One operation on its way.
  struct Kernel {
    std::string name;
    Communicator::Place place;
    std::string signature;
    std::vector<at::Tensor> reads = {};
    std::vector<at::Tensor> writes = {};
    /// Makes what `writes` get.
    Communicator::Compute compute = {};
  };
  Kernel kernel(std::string name, const at::Tensor& size, std::string more = "");
  Kernel message(const char* name, const at::Tensor& tensor, int from, int to);
  /// Launches it, or keeps it until endCoalescing().
  c10::intrusive_ptr<c10d::Work> launch(Kernel kernel, bool in_current_stream, std::chrono::milliseconds timeout);
  /// Calls that belong together.
  c10::intrusive_ptr<c10d::Work> one_by_one(size_t count, const std::function<void(size_t)>& call);
  c10::intrusive_ptr<c10d::Work> launch_all(
      std::vector<Kernel> kernels, bool in_current_stream, std::chrono::milliseconds timeout);

  const at::Device device_;
  const c10::Stream stream_;
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Communicator> communicator_;
  std::map<std::string, uint64_t> meetings_;
  std::optional<std::vector<Kernel>> together_;
};

} // namespace late
