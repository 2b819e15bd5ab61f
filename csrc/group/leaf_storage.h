#pragma once

#include <shardwise/export.h>

#include <ATen/core/Tensor.h>

#include <string>

namespace shardwise::group {

/// Whether the memory of this tensor is freed: it has elements, and its storage has no bytes. Reading such a tensor
/// outside of the touch trigger ends the process, so ask first.
SHARDWISE_API bool is_freed(const at::Tensor& tensor);

/// Memory that is freed and replaced in place: tensors in it, views of them and what autograd saved stay what they are,
/// and their version counters stay where they are.
///
/// Belongs to one thread at a time. On a device, who frees orders the streams that still use it.
class SHARDWISE_API LeafStorage {
 public:
  /// All of the storage that the tensor lies in, which is a leaf or a buffer that leaves are views of. Works in
  /// inference mode too. Raises ValueError when there is no memory now, or when it is not torch's to free (from_blob,
  /// a mapped file).
  explicit LeafStorage(const at::Tensor& tensor);
  /// Of a new tensor of these sizes, which has no memory yet: views of the alias may be made, and nothing read or
  /// written, before free() and refill().
  LeafStorage(at::IntArrayRef sizes, const at::TensorOptions& options);

  size_t bytes() const {
    return bytes_;
  }
  const c10::StorageImpl* storage() const {
    return alias_.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  }
  bool freed() const;
  /// Lets go of the memory; its content is lost. Nothing happens when it is freed already.
  void free();
  /// In a forked child, where its memory is not: who reads or writes it gets an error.
  void refuse_in_child();
  /// Takes its bytes of that memory, from `offset` on, with what is there, and keeps it alive. Where it has some
  /// already, that may be read again.
  void refill(const at::Tensor& memory, size_t offset = 0);

  /// From now on who reads freed memory past all operations, by data_ptr() or an accessor, gets an error of this text.
  void set_read_error(const std::string& text);
  /// The same for memory that is there and out of date, until refill().
  void expire();

  /// The tensor's elements, to write them: no gradient, no touch key and a version counter of its own, since a write
  /// that moved the leaf's would make backward refuse what it saved. Raises Error while freed.
  const at::Tensor& alias() const;

 private:
  void set_readable(bool readable);

  at::Tensor alias_;
  size_t bytes_;
  bool has_read_error_ = false;
};

} // namespace shardwise::group
