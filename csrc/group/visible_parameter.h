#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace shardwise::group {

/// The tensor that a front end gives to programs in place of a parameter's own: in Python, a DTensor that wraps this
/// rank's shard.
class VisibleParameter {
 public:
  virtual ~VisibleParameter() = default;
  /// What the optimizer holds.
  virtual const at::Tensor& parameter() const = 0;
  /// Wraps this part of the mean; the result becomes parameter().grad(). Gives the same tensor again for the same mean,
  /// if nothing else holds it.
  virtual at::Tensor gradient(const at::Tensor& mean) = 0;
  /// Whether anything besides its owner and gradient() holds this mean.
  virtual bool is_held(const at::Tensor& mean) const = 0;
  /// Releases the means of gradients that nothing else holds any more.
  virtual void release() = 0;
  /// Runs `work`, which calls several of these functions: cheaper than calling them one by one.
  virtual void at_once(c10::function_ref<void()> work) const {
    work();
  }
  /// The memory that a gradient of parameter() wraps.
  virtual at::Tensor memory(const at::Tensor& gradient) = 0;
  /// The same for a gradient that autograd brought to the leaf.
  virtual at::Tensor arrived(const at::Tensor& gradient) = 0;
  /// Whether arrived() may sum that gradient over ranks of another kind of parallelism.
  virtual bool may_sum_arriving() const = 0;
};

} // namespace shardwise::group
