#include "group/leaf_storage.h"

#include "base/compute_guard.h"
#include "transport/transport.h"

#include <shardwise/error.h>

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <c10/util/intrusive_ptr.h>

namespace shardwise::group {

namespace {

// torch can set the flag that makes reads by pointer fail, but not clear it. This gives access to the private member.
template <auto Member>
struct ReadFlag {
  friend bool& read_flag(c10::StorageImpl& storage) {
    return storage.*Member;
  }
};
bool& read_flag(c10::StorageImpl& storage);
template struct ReadFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

bool is_freed(c10::StorageImpl& storage) {
  const bool refuses = read_flag(storage) && storage._mutable_data_ptr_no_checks().get() == nullptr;
  // Symbolic, since tensors without memory of their own may have such sizes.
  return refuses || storage.sym_nbytes().maybe_as_int() == 0;
}

void release_owner(void* owner) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(owner));
}

} // namespace

bool is_freed(const at::Tensor& tensor) {
  auto* storage = tensor.defined() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
  return storage != nullptr && is_freed(*storage) && tensor.sym_numel().maybe_as_int() != 0;
}

LeafStorage::LeafStorage(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const base::ComputeGuard guard;
  alias_ = at::empty({0}, options);
  alias_.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  bytes_ = alias_.nbytes();
  // torch refuses views of a tensor whose storage claims fewer bytes than the tensor needs.
  storage()->set_nbytes(bytes_);
}

bool LeafStorage::freed() const {
  return bytes_ != 0 && is_freed(*storage());
}

void LeafStorage::set_read_error(const std::string& text) {
  const bool is_readable = !read_flag(*storage());
  storage()->release_data_and_set_meta_custom_data_ptr_error_msg_(text);
  has_read_error_ = true;
  set_readable(is_readable);
}

void LeafStorage::set_readable(bool readable) {
  if (has_read_error_) read_flag(*storage()) = !readable;
}

void LeafStorage::expire() {
  set_readable(false);
}

void LeafStorage::free() {
  set_readable(false);
  storage()->set_data_ptr_noswap(at::DataPtr(nullptr, storage()->device()));
  // A backward that makes views of what it saved gets our error when these are read, not torch's about their size.
  set_nbytes(has_read_error_ ? bytes_ : 0);
}

void LeafStorage::refill(const at::Tensor& memory, size_t offset) {
  const bool has_memory = !freed();
  set_readable(true);
  if (has_memory) return;
  auto* source = memory.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  TORCH_INTERNAL_ASSERT(offset + bytes_ <= source->nbytes());
  auto owner = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(source);
  auto* data = static_cast<char*>(owner->mutable_data()) + offset;
  storage()->set_data_ptr_noswap({data, owner.release(), &release_owner, storage()->device()});
  set_nbytes(bytes_);
}

void LeafStorage::set_nbytes(size_t bytes) {
  if (storage()->nbytes() != bytes) storage()->set_nbytes(bytes);
}

void LeafStorage::refuse_in_child() {
  transport::refuse_in_child(*storage());
}

const at::Tensor& LeafStorage::alias() const {
  if (freed()) {
    throw Error(c10::str(
        "shardwise: a tensor of sizes ", alias_.sizes(),
        " was about to be written while its memory is freed. This is a bug in shardwise: please report it with this "
        "text."));
  }
  return alias_;
}

} // namespace shardwise::group
