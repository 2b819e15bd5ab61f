#pragma once

#include <c10/core/GradMode.h>
#include <torch/optim/optimizer.h>

namespace shardwise::optim {

/// The loss that a closure computes, with gradients; undefined if there is none.
inline at::Tensor loss_of(const torch::optim::Optimizer::LossClosure& closure) {
  const c10::AutoGradMode with_grad(true);
  return closure ? closure() : at::Tensor();
}

} // namespace shardwise::optim
