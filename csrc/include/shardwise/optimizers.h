#pragma once

/// @file
/// The optimizers of LibTorch, computed by the operations that PyTorch's optimizers call with fused=True: one for all
/// parameters of a group that have the same dtype and device, where torch::optim computes parameter by parameter. The
/// values are PyTorch's to the bit.
///
/// In all else they are torch::optim's: options, groups, state, archives and learning-rate schedulers. Make them from
/// the module's parameters() after fully_shard() or replicate(). Parameters without a gradient stay as they are, and so
/// does their state. A parameter that is listed twice, as tied ones are, changes once in a step.
///
/// The state of a parameter follows it to another dtype or device. It may come from an archive or from the program:
/// state() then has objects of torch::optim's class, which the next step takes over.

#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

namespace shardwise {

class GradScaler;

namespace detail {

/// A step whose gradients GradScaler has scaled: the operation itself divides them, and does nothing if they are not
/// finite, so the host need not wait for that.
class SHARDWISE_API ScaledStep {
 protected:
  /// Undefined: gradients are not scaled, or not checked.
  at::Tensor grad_scale_;
  at::Tensor found_inf_;

 private:
  friend class shardwise::GradScaler;
};

} // namespace detail

/// torch::optim::AdamW in one operation. state() counts a step that a device skipped until the state is saved.
class SHARDWISE_API AdamW : public torch::optim::AdamW, public detail::ScaledStep {
 public:
  using torch::optim::AdamW::AdamW;
  /// Returns the closure's loss, if there is a closure. Raises ValueError for parameters that are not of half,
  /// bfloat16, float or double, for sparse gradients, and for gradients of another dtype, device or shape than their
  /// parameter; all parameters stay as they are then.
  at::Tensor step(LossClosure closure = nullptr) override;
};

/// torch::optim::Adam in one operation. state() counts a step that a device skipped until the state is saved.
class SHARDWISE_API Adam : public torch::optim::Adam, public detail::ScaledStep {
 public:
  using torch::optim::Adam::Adam;
  /// Returns the closure's loss and raises ValueError, as AdamW::step() does.
  at::Tensor step(LossClosure closure = nullptr) override;
};

/// torch::optim::SGD in one operation.
class SHARDWISE_API SGD : public torch::optim::SGD, public detail::ScaledStep {
 public:
  using torch::optim::SGD::SGD;
  /// Returns the closure's loss and raises ValueError, as AdamW::step() does.
  at::Tensor step(LossClosure closure = nullptr) override;
};

} // namespace shardwise
