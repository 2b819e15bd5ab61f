#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/cpp_hook.h>

#include <functional>

namespace shardwise::base {

/// The list of the tensor's C++ hooks; null if there is none, or if Python's hooks took its place.
torch::autograd::hooks_list* live_hooks_list(const at::Tensor& tensor);

/// Registers a hook on the gradients of a leaf, whether it is trained now or not. A tensor can own something by one,
/// even through set_data().
void add_hook(const at::Tensor& leaf, std::function<at::TensorBase(const at::TensorBase&)> hook);

} // namespace shardwise::base
