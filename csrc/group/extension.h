#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace shardwise::group {

/// A parameter's custom gather: what is sent of its shard, and how its full copy is made. The shard is then not a piece
/// of a vector, and may be any kind of tensor.
class Extension {
 public:
  virtual ~Extension() = default;
  /// What this rank sends. Sizes and dtypes are the same on all ranks, and at every call.
  virtual std::vector<at::Tensor> inputs() = 0;

  /// What its module computes with, and the tensor with its memory, in the sizes of the whole parameter; undefined if
  /// the leaf has its own memory.
  struct Leaf {
    at::Tensor leaf;
    at::Tensor full;
  };
  /// Makes the full copy from the inputs of all ranks, joined along their first dimension. The tensors given are the
  /// same at every call, and have memory until free(). Returns the leaf if it is a new one, as at the first call.
  virtual std::optional<Leaf> make_full(const std::vector<at::Tensor>& outputs) = 0;
  /// Frees memory other than that of the tensors given to make_full().
  virtual void free() = 0;
};

} // namespace shardwise::group
