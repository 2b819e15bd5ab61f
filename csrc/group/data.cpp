#include "group/data.h"

#include <torch/csrc/autograd/variable.h>

#include <mutex>

namespace shardwise::group {

// set_data() replaces one kind of memory by another only if both are dense, which the meta device is not, or have the
// same keys, which a watched tensor and a new one do not.
void replace_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (!tensor.is_meta() && !data.is_meta()) return tensor.set_data(data);
  // A gradient accumulator that was made while the tensor had no values expects gradients of the old kind.
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
