#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

namespace shardwise::transport {

/// Takes collectives of a device's tensors through pinned memory of the host. The copies run on two streams, one in
/// each direction, and the worker's thread waits for them. On CUDA torch's pool lends these, perhaps to others too, or
/// one for both: copies then run after one another or after what others issue, and nothing worse happens, since no
/// stream waits for the host. A driver may make the program's thread wait until all streams are done, as CUDA's does
/// when it loads a kernel, and meanwhile no other thread can use the device.
class Staging {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit Staging(c10::Device device);

  /// The copies of a collective's tensors in the host's memory.
  class Copies {
   public:
    /// Pairs of a tensor and its copy.
    std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
    const at::Tensor& of(const at::Tensor& tensor) const;
    template <typename Several>
    std::vector<Several> of(const std::vector<Several>& all) const {
      std::vector<Several> copies;
      for (const auto& each : all) copies.push_back(of(each));
      return copies;
    }
  };
  /// The collective reads `reads` and writes `writes`, and `start` starts it with the copies. Their exchange may not
  /// begin before what `wait_first` gets has returned, which waits on the host, and may raise. The host waits in
  /// Work::wait(), until the results are on their way back; then the current stream does.
  WorkPtr carry(
      c10d::OpType type, const Tensors& reads, const Tensors& writes,
      c10::function_ref<void(std::function<void()> ready)> wait_first,
      c10::function_ref<WorkPtr(const Copies& copies)> start);

 private:
  class StagedWork;

  const c10::Device device_;
  const c10::Stream out_;
  const c10::Stream in_;
};

inline bool on_host(const at::Tensor& tensor) {
  return tensor.is_cpu();
}
template <typename Several>
bool on_host(const std::vector<Several>& all) {
  return std::all_of(all.begin(), all.end(), [](const auto& each) { return on_host(each); });
}

/// The tensors of an argument of a collective.
inline Staging::Tensors all_of(const at::Tensor& tensor) {
  return {tensor};
}
template <typename Several>
Staging::Tensors all_of(const std::vector<Several>& all) {
  Staging::Tensors tensors;
  for (const auto& each : all) {
    for (auto& tensor : all_of(each)) tensors.push_back(std::move(tensor));
  }
  return tensors;
}

/// Receives into the tensors themselves if they are on the host, else into a copy, which reaches its tensor at the end
/// of the wait.
Staging::WorkPtr received(
    Staging::Tensors& tensors, const std::function<Staging::WorkPtr(Staging::Tensors& own)>& receive);

} // namespace shardwise::transport
