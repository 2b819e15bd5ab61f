#include "base/compute_guard.h"
#include "group/data.h"
#include "group/full_copies.h"
#include "group/pieces.h"
#include "transport/transport.h"

#include <shardwise/error.h>

#include <ATen/ops/detach.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::group {
namespace {

/// This rank's piece of what is in the registry: all of that, or a piece of it if a whole parameter was loaded there.
at::Tensor own_piece(const Parameter& parameter, const layout::Cut& cut, int64_t rank) {
  auto shard = parameter.stored();
  if (shard.sizes() == cut.piece_sizes(rank)) return shard;
  const auto whole = parameter.full().sizes();
  if (shard.sizes() == whole) return piece_of(shard, cut, rank);
  throw Error(c10::str(
      "shardwise: rank ", rank, ": the parameter '", parameter.name(), "' was replaced by a tensor of sizes ",
      shard.sizes(), ". Its sizes must be those of this rank's shard, ", at::IntArrayRef(cut.piece_sizes(rank)),
      ", or of the whole parameter, ", whole,
      ". Load an archive that the same model saved on the same number of ranks."));
}

const void* first_element(const at::TensorImpl& tensor) {
  return static_cast<const char*>(tensor.unsafe_storage().data()) +
         tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
}

} // namespace

void FullCopies::adopt_shards(FrontEndCallbacks& front, bool takes_memory) {
  {
    const base::ComputeGuard guard;
    part_ = transport::shared_zeros(layout_.part, kinds_.shards);
    part_is_shared_ = transport::is_shared(part_);
  }
  elsewhere_.resize(parameters().size());
  seen_.resize(parameters().size());
  lies_at_.resize(parameters().size());
  for (const auto& cut : layout_.cuts) numels_.push_back(cut.piece_numel(rank_));
  for (size_t i = 0; i < parameters().size(); ++i) {
    const auto shard = parameters()[i]->stored();
    const bool is_piece = shard.sizes() == layout_.cuts[i].piece_sizes(rank_);
    if (takes_memory || !is_piece || part_.is_meta() || !is_alike(*shard.unsafeGetTensorImpl(), i)) {
      move_into_part(i, front);
    } else {
      leave_where_it_is(i, front);
    }
  }
  watches_.push_back(front.watch(part_, FrontEndCallbacks::Role::shard));
}

at::Tensor FullCopies::own_part(size_t index) const {
  return piece_in(part_, layout_.cuts[index], rank_, 0);
}

void FullCopies::move_into_part(size_t index, FrontEndCallbacks& front) {
  const auto shard = parameters()[index]->stored();
  {
    const base::ComputeGuard guard;
    host_read_.make_host_wait();
    auto piece = own_part(index);
    piece.copy_(own_piece(*parameters()[index], layout_.cuts[index], rank_));
    replace_data(shard, front.shown(piece));
  }
  elsewhere_[index] = at::Tensor();
  saw(index, shard);
  front.mark(shard);
}

void FullCopies::leave_where_it_is(size_t index, FrontEndCallbacks& front) {
  const auto shard = parameters()[index]->stored();
  {
    const base::ComputeGuard guard;
    elsewhere_[index] = shard.detach();
  }
  saw(index, shard);
  front.mark(shard);
  watches_.push_back(front.watch(shard, FrontEndCallbacks::Role::shard));
}

// Copies shards that lie elsewhere into the part, which is sent. Returns the number of bytes.
int64_t FullCopies::collect() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < elsewhere_.size(); ++i) {
    if (!elsewhere_[i].defined()) continue;
    host_read_.make_host_wait();
    own_part(i).copy_(elsewhere_[i]);
    bytes += static_cast<int64_t>(elsewhere_[i].nbytes());
  }
  return bytes;
}

bool FullCopies::has_memory() const {
  return std::none_of(elsewhere_.begin(), elsewhere_.end(), [](const auto& shard) { return shard.defined(); });
}

bool FullCopies::take_memory(FrontEndCallbacks& front) {
  for (size_t i = 0; i < parameters().size(); ++i) {
    const auto* shard = parameters()[i]->live_shard();
    if (shard == nullptr || parameters()[i]->extension() || !is_alike(*shard, i)) return false;
  }
  for (size_t i = 0; i < parameters().size(); ++i) {
    if (elsewhere_[i].defined() || !fits(i)) move_into_part(i, front);
  }
  mark_stale();
  return true;
}

bool FullCopies::fits() const {
  for (size_t i = 0; i < parameters().size(); ++i) {
    if (!fits(i)) return false;
  }
  return true;
}

bool FullCopies::is_alike(const at::TensorImpl& shard, size_t index) const {
  const auto* part = part_.unsafeGetTensorImpl();
  return shard.has_storage() && shard.dtype() == part->dtype() && shard.device() == part->device() &&
         shard.numel() == numels_[index];
}

void FullCopies::saw(size_t index, const at::Tensor& shard) {
  seen_[index] = shard.storage();
  lies_at_[index] = first_element(*shard.unsafeGetTensorImpl());
}

// Called very often. A shard that has elements is known by their address, not by its storage: a front end may show it
// through another one (FrontEndCallbacks::place).
bool FullCopies::fits(size_t index) const {
  const auto* parameter = parameters()[index];
  const auto* shard = parameter->live_shard();
  if (shard == nullptr || parameter->extension() || !shard->has_storage() || shard->dtype() != part_.dtype() ||
      shard->numel() != numels_[index]) {
    return false;
  }
  if (part_.is_meta()) return shard->is_meta();
  if (numels_[index] == 0) {
    return shard->unsafe_storage().unsafeGetStorageImpl() == seen_[index].unsafeGetStorageImpl();
  }
  return first_element(*shard) == lies_at_[index];
}

} // namespace shardwise::group
