#pragma once

#include <shardwise/export.h>

#include <ATen/core/Tensor.h>

namespace shardwise::group {

/// Whether the memory of this tensor is freed: it has elements, and its storage has no bytes. Reading such a tensor
/// outside of the touch trigger ends the process, so ask first.
SHARDWISE_API bool is_freed(const at::Tensor& tensor);

/// Memory that is freed and allocated again in place: tensors in it, views of them and what autograd saved stay what
/// they are, and their version counters stay where they are.
///
/// Belongs to one thread at a time. On a device, memory is allocated on the current stream; who frees orders the
/// streams that still use it.
class SHARDWISE_API LeafStorage {
 public:
  /// All of the storage that the tensor lies in, which is a leaf or a buffer that leaves are views of. Works in
  /// inference mode too. Raises ValueError when there is no memory now, or when it is not torch's to free (from_blob,
  /// a mapped file).
  explicit LeafStorage(const at::Tensor& tensor);

  bool freed() const;
  /// Gives the memory back; its content is lost. Nothing happens when it is freed already.
  void free();
  /// Brings memory of the same size, with any content. Nothing happens when it is there already. When there is not
  /// enough memory the allocator's error comes through and it stays freed.
  void allocate();

  /// The tensor's elements, to write them: no gradient, no touch key and a version counter of its own, since a write
  /// that moved the leaf's would make backward refuse what it saved. Raises Error while freed.
  const at::Tensor& alias() const;

 private:
  at::Tensor alias_;
  size_t bytes_;
};

} // namespace shardwise::group
