#include "group/sum.h"

#include "base/compute_guard.h"
#include "group/copy_batch.h"
#include "group/parameter.h"
#include "transport/transport.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <utility>

namespace shardwise::group {

bool Sum::is_free(const std::vector<Parameter*>& parameters) const {
  if (!vector_.defined()) return false;
  if (rests_) return true;
  // If the program gave a view other memory, the counts differ, and the sum counts as in use.
  const auto made = std::count_if(views_.begin(), views_.end(), [](const auto& view) { return view.tensor.defined(); });
  if (vector_.storage().use_count() != static_cast<size_t>(made) + 1) return false;
  for (size_t i = 0; i < views_.size(); ++i) {
    const auto& view = views_[i].tensor;
    if (!view.defined()) continue;
    const auto& visible = parameters[i]->visible_parameter();
    if (visible ? visible->is_held(view) : view.use_count() > 1) return false;
  }
  return true;
}

bool Sum::may_rest() const {
  if (rests_ || !vector_.defined()) return false;
  return vector_.is_cpu() ? transport::is_in_arena(vector_) : vector_.storage().allocator() != nullptr;
}

// On a device the streams that used the memory are done with it as far as the current stream can tell: it waited for
// them when the sum was published.
void Sum::rest(const std::vector<Parameter*>& parameters) {
  if (!may_rest() || !is_free(parameters)) return;
  auto& storage = *vector_.storage().unsafeGetStorageImpl();
  if (vector_.is_cpu()) {
    transport::free_in_arena(storage);
  } else {
    storage.set_data_ptr_noswap(at::DataPtr(nullptr, vector_.device()));
  }
  rests_ = true;
}

void Sum::wake() {
  if (!std::exchange(rests_, false)) return;
  auto& storage = *vector_.storage().unsafeGetStorageImpl();
  if (vector_.is_cpu()) return transport::refill_in_arena(storage);
  const c10::DeviceGuard guard(vector_.device());
  storage.set_data_ptr_noswap(storage.allocator()->allocate(storage.nbytes()));
}

void Sum::renew(at::Tensor vector) {
  rests_ = false;
  views_.clear();
  vector_ = std::move(vector);
}

// The program may have given the view other memory or sizes, or have made autograd track it.
bool Sum::is_as_made(const View& view, at::IntArrayRef sizes, int64_t offset) const {
  if (!view.tensor.defined()) return false;
  const auto* impl = view.tensor.unsafeGetTensorImpl();
  const auto* ours = vector_.unsafeGetTensorImpl();
  const auto storage_of = [](const at::TensorImpl* tensor) { return tensor->unsafe_storage().unsafeGetStorageImpl(); };
  return impl->autograd_meta() == nullptr && impl->has_storage() && storage_of(impl) == storage_of(ours) &&
         impl->dtype() == ours->dtype() && impl->storage_offset() == offset && impl->sizes() == sizes &&
         impl->strides() == at::IntArrayRef(view.strides);
}

const at::Tensor& Sum::view(
    size_t index, at::IntArrayRef sizes, int64_t offset, c10::function_ref<c10::DimVector()> strides) {
  if (views_.size() <= index) views_.resize(index + 1);
  auto& view = views_[index];
  if (!is_as_made(view, sizes, offset)) {
    const base::ComputeGuard guard;
    view.strides = strides();
    view.tensor = view_of(vector_, sizes, view.strides, offset);
  }
  return view.tensor;
}

} // namespace shardwise::group
