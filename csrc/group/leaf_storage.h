#pragma once

#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>

#include <string>

namespace shardwise::group {

/// Whether the memory of this tensor is freed: it has elements, and its storage has no bytes or refuses to be read.
SHARDWISE_API bool is_freed(const at::Tensor& tensor);

/// Memory that is freed and replaced in place: tensors in it, views of them and what autograd saved stay valid, and no
/// version counter moves.
///
/// Belongs to one thread at a time. On a device, the caller of free() orders the streams that still use it.
class SHARDWISE_API LeafStorage {
 public:
  /// For a new tensor of these sizes that has no memory yet: views of the alias may be made, but nothing may be read or
  /// written before free() and refill().
  LeafStorage(at::IntArrayRef sizes, const at::TensorOptions& options);

  size_t bytes() const {
    return bytes_;
  }
  c10::StorageImpl* storage() const {
    return alias_.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  }
  bool freed() const;
  /// Frees the memory; its content is lost. Does nothing if it is freed already.
  void free();
  /// For a forked child, where the memory does not exist: reads and writes raise an error.
  void refuse_in_child();
  /// Uses that memory from byte `offset` on, with its content, and keeps it alive. If it has memory already, only makes
  /// that readable again.
  void refill(const at::Tensor& memory, size_t offset = 0);

  /// From now on a read of freed memory without an operation, by data_ptr() or an accessor, raises this error.
  void set_read_error(const std::string& text);
  /// The memory stays but is out of date: such reads get the same error until refill().
  void expire();

  /// The tensor's elements, for writing. It has no gradient, no touch key and its own version counter: a write that
  /// moved the leaf's would make backward refuse what it saved. Raises Error while freed.
  const at::Tensor& alias() const;

 private:
  void set_readable(bool readable);
  void set_nbytes(size_t bytes);

  at::Tensor alias_;
  size_t bytes_;
  bool has_read_error_ = false;
};

} // namespace shardwise::group
