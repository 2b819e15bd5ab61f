#include "nn/touch/pieces.h"

#include <algorithm>

namespace shardwise::nn {
namespace {

/// A shard without elements may lie where another one begins.
bool lies_in(const at::Tensor& tensor, const c10::TensorImpl* piece) {
  return piece != nullptr && piece->has_storage() &&
         piece->unsafe_storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl() &&
         piece->storage_offset() <= tensor.storage_offset() &&
         tensor.storage_offset() < piece->storage_offset() + std::max<int64_t>(piece->numel(), tensor.numel() == 0);
}

} // namespace

Cut::Cut(const c10::TensorImpl& piece, int64_t dimension)
    : size_(piece.size(dimension)),
      stride_(piece.stride(dimension)),
      numel_(piece.numel()) {}

std::optional<int64_t> Cut::dimension_in(const at::Tensor& view) const {
  for (int64_t i = 0; i < view.dim(); ++i) {
    if (view.size(i) == size_ && view.stride(i) == stride_) return i;
  }
  return std::nullopt;
}

bool Cut::has_all_rows(const at::Tensor& view) const {
  return view.numel() == 0 || view.numel() == numel_ || dimension_in(view).has_value();
}

const group::Parameter* Pieces::find(const engine::Unit& unit, const at::Tensor& tensor) const {
  const auto& all = unit.parameters();
  const auto is_there = [&](size_t index) {
    const auto& parameter = *all[index];
    const auto* shard = parameter.whole ? nullptr : parameter.live_shard();
    return shard != nullptr && (lies_in(tensor, shard) || is_piece_of_gradient(parameter, tensor));
  };
  const Place place{tensor.storage().unsafeGetStorageImpl(), tensor.storage_offset()};
  const std::lock_guard lock(mutex_);
  const auto known = found_.find(place);
  if (known != found_.end() && is_there(known->second)) return all[known->second].get();
  for (size_t i = 0; i < all.size(); ++i) {
    if (!is_there(i)) continue;
    if (found_.size() > 4 * all.size()) found_.clear();
    found_[place] = i;
    return all[i].get();
  }
  return nullptr;
}

bool is_piece_of_gradient(const group::Parameter& parameter, const at::Tensor& tensor) {
  const auto& gradient = parameter.live_shard()->grad();
  return gradient.defined() && lies_in(tensor, gradient.unsafeGetTensorImpl());
}

Cut cut_of(const group::Parameter& parameter, const at::Tensor& piece) {
  const auto* whole = is_piece_of_gradient(parameter, piece) ? parameter.live_shard()->grad().unsafeGetTensorImpl()
                                                             : parameter.live_shard();
  return {*whole, whole->dim() == 1 ? 0 : parameter.shard_dim};
}

} // namespace shardwise::nn
