#pragma once

// What differs between the versions of torch that shardwise is built with, chosen by what their headers have.

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

// Since torch 2.14 there are two back ends for NCCL.
#if __has_include(<torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.hpp>)
#define SHARDWISE_TORCH_HAS_NCCL2
#endif

namespace shardwise::base {

/// Whether torch's name "nccl" stands for the newer one unless TORCH_DIST_USE_NCCL2 says otherwise.
inline constexpr bool kNccl2IsUsual = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15;

/// Up to torch 2.12 autograd holds its nodes by std::shared_ptr, since then by c10::intrusive_ptr.
inline constexpr bool kNodesAreShared =
    std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<torch::autograd::Node>>;

/// How autograd holds a node of class T.
template <typename T>
using NodePointer = std::conditional_t<kNodesAreShared, std::shared_ptr<T>, c10::intrusive_ptr<T>>;

template <typename T, typename... Arguments>
NodePointer<T> make_node(Arguments&&... arguments) {
  if constexpr (kNodesAreShared) {
    // Found in torch's namespace, where newer versions have none.
    return {new T(std::forward<Arguments>(arguments)...), [](auto* node) { deleteNode(node); }};
  } else {
    return c10::make_intrusive<T>(std::forward<Arguments>(arguments)...);
  }
}

// The newest names of these collectives are other ones, and deprecate those below. But these reach every process group:
// of those that have the new names too, and of those that were written before.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

//
// Torch does not pass those of one tensor to a process group written in Python, but those of several.

inline c10::intrusive_ptr<c10d::Work> all_gather(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  if (group.hasBackends()) return group._allgather_base(output, input);
  std::vector<at::Tensor> outputs{output};
  std::vector<at::Tensor> inputs{input};
  return group.allgather_into_tensor_coalesced(outputs, inputs);
}

inline c10::intrusive_ptr<c10d::Work> reduce_scatter(c10d::ProcessGroup& group, at::Tensor& output, at::Tensor& input) {
  if (group.hasBackends()) return group._reduce_scatter_base(output, input);
  std::vector<at::Tensor> outputs{output};
  std::vector<at::Tensor> inputs{input};
  return group.reduce_scatter_tensor_coalesced(outputs, inputs);
}

#pragma GCC diagnostic pop

/// Whether torch's own engine leaves gradients in the dtype in which they were computed until they are summed.
inline constexpr bool kGradientsKeepTheirDtype = TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15;

} // namespace shardwise::base
