#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace shardwise::group {

/// A parameter's own way to travel: what is sent of its shard, and what its full copy is made of. The shard is then no
/// piece of a vector, and may be any kind of tensor.
class Extension {
 public:
  virtual ~Extension() = default;
  /// What this rank sends. Sizes and dtypes are the same on all ranks, and at every call.
  virtual std::vector<at::Tensor> inputs() = 0;

  /// What its module computes with, and the memory of that with the sizes of the whole parameter; undefined where it
  /// has its own.
  struct Leaf {
    at::Tensor leaf;
    at::Tensor full;
  };
  /// Makes the full copy of the inputs of all ranks, joined along their first dimension. These tensors are the same at
  /// every call, and have memory until free(). Gives the leaf when it is a new one: at the first call.
  virtual std::optional<Leaf> make_full(const std::vector<at::Tensor>& outputs) = 0;
  /// Lets go of memory beside that of the outputs.
  virtual void free() = 0;
};

} // namespace shardwise::group
