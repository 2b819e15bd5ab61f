#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace shardwise::group {

/// What stands for a parameter where a front end does not show its memory as it is: in Python a DTensor that is around
/// this rank's shard.
class VisibleParameter {
 public:
  virtual ~VisibleParameter() = default;
  /// What the optimizer holds.
  virtual const at::Tensor& parameter() const = 0;
  /// Around this part of the mean; becomes parameter().grad(). The same one again for the same tensor, if nobody else
  /// holds it.
  virtual at::Tensor gradient(const at::Tensor& mean) = 0;
  /// Whether anybody has a hold on this mean, besides its owner and gradient().
  virtual bool is_held(const at::Tensor& mean) const = 0;
  /// Lets go of the means of gradients that nobody else holds any more.
  virtual void release() = 0;
  /// Runs what asks several of one kind: cheaper than by one question after the other.
  virtual void at_once(c10::function_ref<void()> work) const {
    work();
  }
  /// The memory that a gradient of parameter() is around.
  virtual at::Tensor memory(const at::Tensor& gradient) = 0;
  /// The same of what autograd brought to the leaf.
  virtual at::Tensor arrived(const at::Tensor& gradient) = 0;
};

} // namespace shardwise::group
