#pragma once

#include <ATen/core/Tensor.h>

namespace shardwise::group {

/// What stands for a parameter where a front end does not show its memory as it is: in Python a DTensor that is around
/// this rank's shard.
class Face {
 public:
  virtual ~Face() = default;
  /// What the optimizer holds.
  virtual const at::Tensor& parameter() const = 0;
  /// Around this part of the mean; becomes parameter().grad().
  virtual at::Tensor gradient(const at::Tensor& mean) = 0;
  /// Lets go of the memory of a gradient that nobody else holds any more.
  virtual void release() = 0;
  /// The memory that a gradient of parameter() is around.
  virtual at::Tensor memory(const at::Tensor& gradient) = 0;
  /// The same of what autograd brought to the leaf.
  virtual at::Tensor arrived(const at::Tensor& gradient) = 0;
};

} // namespace shardwise::group
