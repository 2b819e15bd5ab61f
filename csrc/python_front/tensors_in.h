#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>

namespace shardwise::python_front {

/// Visits the tensors in what a module returned: in tuples, lists, dicts, dataclasses, and in whatever pytree knows. Of
/// one under a transform of torch.func, also what the transform wraps, and its derivative.
void for_each_tensor_in(pybind11::handle value, const std::function<void(const at::Tensor&)>& visit);

} // namespace shardwise::python_front
