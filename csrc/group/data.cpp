#include "group/data.h"

#include <torch/csrc/autograd/variable.h>

#include <mutex>

namespace shardwise::group {

// set_data() takes tensors of one kind of memory for another's only where both are dense, and the meta device has none.
void replace_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (tensor.is_meta() == data.is_meta()) return tensor.set_data(data);
  // What a graph made while it had no values knows of it is out of date.
  if (auto* meta = torch::autograd::impl::get_autograd_meta(tensor)) {
    const std::lock_guard lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  tensor.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

bool is_plain(const at::Tensor& tensor) {
  const auto keys = tensor.unsafeGetTensorImpl()->key_set();
  return tensor.layout() == at::kStrided && tensor.has_storage() && !keys.has(c10::DispatchKey::Python);
}

} // namespace shardwise::group
