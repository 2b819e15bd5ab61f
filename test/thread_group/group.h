#pragma once

#include "meeting.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace thread_group {

/// A back end of process groups for ranks that are threads of one process: those of c10d's calls that the library
/// makes, as operations that the ranks meet for. How they run is for others to say.
class Group : public c10d::Backend {
 public:
  Group(const std::string& name, int rank, int size, const at::Device& device, std::chrono::milliseconds timeout);

  const std::string getBackendName() const override {
    return options_->backend;
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  c10::intrusive_ptr<c10d::Work> allreduce(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> broadcast(
      std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;

 protected:
  /// One operation on its way.
  struct Kernel {
    const char* name;
    Place place;
    std::string signature;
    std::vector<at::Tensor> reads = {};
    std::vector<at::Tensor> writes = {};
    /// Makes what `writes` get.
    Compute compute = {};
  };
  /// Runs what was called together. `in_current_stream`: what the current stream gets from now on has the results,
  /// without a wait().
  virtual c10::intrusive_ptr<c10d::Work> launch_all(
      std::vector<Kernel> kernels, bool in_current_stream, std::chrono::milliseconds timeout) = 0;

  const at::Device& device() const {
    return device_;
  }
  std::chrono::milliseconds time_limit(std::chrono::milliseconds of_call) const {
    return of_call == c10d::kUnsetTimeout ? options_->timeout : of_call;
  }

 private:
  Kernel kernel(const char* name, const at::Tensor& size, const std::string& more = "");
  Kernel message(const char* name, const at::Tensor& tensor, int from, int to);
  /// Launches it, or keeps it until endCoalescing().
  c10::intrusive_ptr<c10d::Work> launch(Kernel kernel, bool in_current_stream, std::chrono::milliseconds timeout);
  /// Calls that belong together.
  c10::intrusive_ptr<c10d::Work> one_by_one(size_t count, const std::function<void(size_t)>& call);

  const at::Device device_;
  c10::intrusive_ptr<Options> options_;
  std::map<std::string, uint64_t> meetings_;
  std::optional<std::vector<Kernel>> together_;
};

} // namespace thread_group
