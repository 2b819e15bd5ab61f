#include "group/part.h"

#include "base/compute_guard.h"
#include "group/data.h"
#include "group/pieces.h"
#include "transport/transport.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::group {

Part::Part(
    const std::vector<Parameter*>& parameters, const layout::Shards& layout, int64_t rank,
    const at::TensorOptions& kind, bool takes_memory, FrontEndCallbacks& front)
    : parameters_(parameters),
      layout_(layout),
      rank_(rank),
      itemsize_(static_cast<int64_t>(kind.dtype().itemsize())) {
  vector_ = base::guarded([&] { return transport::shared_zeros(layout.part, kind); });
  is_shared_ = transport::is_shared(vector_);
  for (const auto& cut : layout.cuts) seen_.push_back({cut.piece_numel(rank), nullptr, {}, {}});
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto shard = parameters[i]->stored();
    const bool is_piece = shard.sizes() == layout.cuts[i].piece_sizes(rank);
    if (takes_memory || !is_piece || vector_.is_meta() || !is_alike(*shard.unsafeGetTensorImpl(), i)) {
      move(i, front);
    } else {
      leave_where_it_is(i, front);
    }
  }
  watches_.push_back(front.watch(vector_, FrontEndCallbacks::Role::shard));
}

int64_t Part::elements() const {
  int64_t sum = 0;
  for (const auto& shard : seen_) sum += shard.numel;
  return sum;
}

at::Tensor Part::place_of(size_t index) const {
  return piece_in(vector_, layout_.cuts[index], rank_, 0);
}

at::Tensor Part::piece_in_registry(size_t index) const {
  const auto& parameter = *parameters_[index];
  const auto& cut = layout_.cuts[index];
  auto shard = parameter.stored();
  if (shard.sizes() == cut.piece_sizes(rank_)) return shard;
  const auto whole = parameter.full().sizes();
  if (shard.sizes() == whole) return piece_of(shard, cut, rank_);
  throw Error(c10::str(
      "shardwise: rank ", rank_, ": the parameter '", parameter.name(), "' was replaced by a tensor of sizes ",
      shard.sizes(), ". It must have the sizes of this rank's shard, ", at::IntArrayRef(cut.piece_sizes(rank_)),
      ", or of the whole parameter, ", whole,
      ". Load an archive that the same model saved on the same number of ranks."));
}

void Part::move(size_t index, FrontEndCallbacks& front) {
  const auto shard = parameters_[index]->stored();
  {
    const base::ComputeGuard guard;
    make_host_wait();
    auto place = place_of(index);
    place.copy_(piece_in_registry(index));
    replace_data(shard, front.shown(place));
  }
  seen_[index].elsewhere = at::Tensor();
  saw(index, shard);
  front.mark(shard);
}

void Part::leave_where_it_is(size_t index, FrontEndCallbacks& front) {
  const auto shard = parameters_[index]->stored();
  seen_[index].elsewhere = base::guarded([&] { return shard.detach(); });
  saw(index, shard);
  front.mark(shard);
  watches_.push_back(front.watch(shard, FrontEndCallbacks::Role::shard));
}

int64_t Part::collect() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < seen_.size(); ++i) {
    const auto& shard = seen_[i].elsewhere;
    if (!shard.defined()) continue;
    make_host_wait();
    place_of(i).copy_(shard);
    bytes += static_cast<int64_t>(shard.nbytes());
  }
  return bytes;
}

bool Part::has_all() const {
  return std::none_of(seen_.begin(), seen_.end(), [](const auto& shard) { return shard.elsewhere.defined(); });
}

bool Part::take_all(FrontEndCallbacks& front) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto* shard = parameters_[i]->live_shard();
    if (shard == nullptr || parameters_[i]->extension() || !is_alike(*shard, i)) return false;
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (seen_[i].elsewhere.defined() || !fits(i)) move(i, front);
  }
  return true;
}

void Part::refuse_in_child() const {
  for (size_t i = 0; i < seen_.size() && is_shared_; ++i) {
    if (!seen_[i].elsewhere.defined()) transport::refuse_in_child(*seen_[i].storage.unsafeGetStorageImpl());
  }
}

bool Part::is_alike(const at::TensorImpl& shard, size_t index) const {
  const auto* vector = vector_.unsafeGetTensorImpl();
  return shard.has_storage() && shard.dtype() == vector->dtype() && shard.device() == vector->device() &&
         shard.numel() == seen_[index].numel;
}

void Part::saw(size_t index, const at::Tensor& shard) {
  seen_[index].storage = shard.storage();
  seen_[index].address = first_element(*shard.unsafeGetTensorImpl());
}

bool Part::fits() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!fits(i)) return false;
  }
  return true;
}

// Called very often. A shard with elements is identified by their address, not by its storage: a front end may show it
// through another storage (FrontEndCallbacks::shown).
bool Part::fits(size_t index) const {
  const auto* parameter = parameters_[index];
  const auto* shard = parameter->live_shard();
  const auto& seen = seen_[index];
  if (shard == nullptr || parameter->extension() || !shard->unsafe_storage() || shard->dtype() != vector_.dtype() ||
      shard->numel() != seen.numel) {
    return false;
  }
  if (vector_.is_meta()) return shard->is_meta();
  if (seen.numel == 0) return shard->unsafe_storage().unsafeGetStorageImpl() == seen.storage.unsafeGetStorageImpl();
  return first_element(*shard) == seen.address;
}

} // namespace shardwise::group
