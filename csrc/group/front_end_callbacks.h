#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

namespace shardwise::group {

/// What a front end does for the tensors whose use it must report to the unit. Called when a group is made, and again
/// when its tensors are replaced.
class FrontEndCallbacks {
 public:
  enum class Role { full, shard };

  virtual ~FrontEndCallbacks() = default;
  /// From now on the tensor is one of the unit's.
  virtual void mark(const at::Tensor& tensor) = 0;
  /// The data for a shard that is stored in this piece: the piece itself, or the same memory shown through another
  /// storage.
  virtual at::Tensor shown(const at::Tensor& piece) {
    return piece;
  }
  /// Uses of this tensor's storage are reported as long as the result lives.
  virtual std::shared_ptr<void> watch(const at::Tensor& tensor, Role role) = 0;
  /// The error text for reads of full copies by pointer, which cannot be seen, while these are freed or out of date.
  /// Empty: torch's own text.
  virtual std::string read_error(const std::string& /*names*/) const {
    return {};
  }
  /// The gradient that a full leaf gets when the mean is published to its shard, until it is used again; undefined for
  /// none.
  virtual at::Tensor absent_gradient(const at::Tensor& /*leaf*/) {
    return {};
  }
  /// The mean was added to this gradient of a shard.
  virtual void published(const at::Tensor& /*gradient*/) {}
  /// Makes the unit's modules show full copies, or else what the optimizer sees.
  virtual void show(bool /*full*/) {}
};

} // namespace shardwise::group
