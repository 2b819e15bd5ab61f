#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace shardwise::optim {

/// Multiplies the gradients of all parameters of an optimizer by `factor`, a number in single precision. Returns one,
/// on the device of `factor`, if any of them was not finite on any rank that shares the parameters, else zero. Raises
/// ValueError for gradients in half precision, unless `takes_half`.
at::Tensor multiply_and_check(const torch::optim::Optimizer& optimizer, const at::Tensor& factor, bool takes_half);

} // namespace shardwise::optim
