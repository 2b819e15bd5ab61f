#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

namespace shardwise::group {

/// What a front end does for tensors whose use it must announce to the unit. Called when a group is made, and again
/// when its tensors were replaced.
class FrontEndCallbacks {
 public:
  enum class Role { full, shard };

  virtual ~FrontEndCallbacks() = default;
  /// The tensor is one of the unit's from now on.
  virtual void mark(const at::Tensor& tensor) = 0;
  /// The memory of this piece, as a shard is to have it.
  virtual at::Tensor place(const at::Tensor& piece) {
    return piece;
  }
  /// Uses of this storage are announced as long as the result lives.
  virtual std::shared_ptr<void> watch(const at::Tensor& tensor, Role role) = 0;
  /// What is said to who reads full copies where no use can be seen, while they are not current. Empty: what torch
  /// says.
  virtual std::string read_error(const std::string& /*names*/) const {
    return {};
  }
  /// What a full leaf has for a gradient once the mean was published to its shard, until it is used again; undefined
  /// for nothing.
  virtual at::Tensor absent_gradient(const at::Tensor& /*leaf*/) {
    return {};
  }
  /// The mean was added to a shard's gradient.
  virtual void published(const at::Tensor& /*gradient*/) {}
  /// The unit's modules are to show full copies from now on, or what the optimizer sees.
  virtual void show(bool /*full*/) {}
};

} // namespace shardwise::group
