#include "base/compute_guard.h"
#include "group/data.h"
#include "group/full_copies.h"
#include "group/pieces.h"

#include <algorithm>

namespace shardwise::group {

void FullCopies::make_rows(FrontEndCallbacks& front) {
  for (size_t i = 0; i < parameters().size(); ++i) {
    const auto& cut = layout_.cuts[i];
    const auto leaf = parameters()[i]->full();
    {
      const base::ComputeGuard guard;
      storages_.emplace_back(leaf.sizes(), kinds_.full);
      const auto& alias = storages_.back().alias();
      replace_data(leaf, alias);
      parameters()[i]->keep_memory(alias);
      for (int64_t rank = 0; rank < layout_.world; ++rank) {
        if (cut.piece_numel(rank) == 0) continue;
        auto rows = piece_of(alias, cut, rank);
        copied_bytes_ += static_cast<int64_t>(rows.nbytes());
        copies_.push_back({i, std::move(rows), runs_of(cut, rank), rank, cut.offsets[rank], CopyBatch::takes(alias)});
      }
    }
    front.mark(leaf);
    parameters()[i]->set_absent_gradient(front.absent_gradient(leaf));
    watches_.push_back(front.watch(leaf, FrontEndCallbacks::Role::full));
  }
  find_placements();
}

// Chooses large pieces in one run that CopyBatch leaves to torch.
void FullCopies::find_placements() {
  if (layout_.world == 1 || !kinds_.full.device().is_cpu()) return;
  std::vector<size_t> starts;
  size_t start = 0;
  for (const auto& storage : storages_) {
    starts.push_back(start);
    start += layout::aligned(storage.bytes());
  }
  const auto item = kinds_.full.dtype().itemsize();
  for (auto& copy : copies_) {
    const auto bytes = copy.rows.nbytes();
    copy.can_place = !copy.is_moved && copy.runs.count == 1 && bytes >= transport::DirectPlacement::kLeast;
    if (!copy.can_place) continue;
    const auto offset = static_cast<size_t>(copy.rank * layout_.part + copy.offset) * item;
    placements_.push_back({offset, bytes, starts[copy.leaf] + static_cast<size_t>(copy.runs.start) * item});
    placed_bytes_ += static_cast<int64_t>(bytes);
  }
  const auto before = [](const auto& a, const auto& b) { return a.offset < b.offset; };
  std::sort(placements_.begin(), placements_.end(), before);
}

void FullCopies::make_flat(FrontEndCallbacks& front) {
  at::Tensor whole;
  {
    const base::ComputeGuard guard;
    storages_.emplace_back(std::vector<int64_t>{layout_.world * layout_.part}, kinds_.full);
    whole = storages_.back().alias();
  }
  for (size_t i = 0; i < parameters().size(); ++i) {
    const auto& cut = layout_.cuts[i];
    const auto leaf = parameters()[i]->full();
    int64_t rank = 0;
    while (rank + 1 < layout_.world && cut.length(rank) == 0) ++rank;
    {
      const base::ComputeGuard guard;
      const auto start = rank * layout_.part + cut.offsets[rank];
      starts_.push_back(cut.shape[0] == 0 ? 0 : start);
      const auto memory = whole.narrow(0, starts_.back(), cut.shape[0]).view(leaf.sizes());
      replace_data(leaf, memory);
      parameters()[i]->keep_memory(memory);
    }
    front.mark(leaf);
    parameters()[i]->set_absent_gradient(front.absent_gradient(leaf));
  }
  watches_.push_back(front.watch(whole, FrontEndCallbacks::Role::full));
}

bool FullCopies::lies_as(const FullCopies& before) const {
  const auto alike = [](const at::TensorOptions& a, const at::TensorOptions& b) {
    return a.dtype() == b.dtype() && a.device() == b.device();
  };
  if (parameters() != before.parameters() || layout_.part != before.layout_.part || is_flat_ != before.is_flat_ ||
      !alike(kinds_.full, before.kinds_.full)) {
    return false;
  }
  for (size_t i = 0; i < parameters().size(); ++i) {
    const auto& storage = before.storages_[is_flat_ ? 0 : i];
    if (parameters()[i]->live_full().unsafe_storage().unsafeGetStorageImpl() != storage.storage()) return false;
  }
  return true;
}

// With the same storages, views of the leaves that an operation is about to read, or that autograd saved, stay valid.
void FullCopies::take_storages(const FullCopies& before, FrontEndCallbacks& front) {
  storages_ = before.storages_;
  starts_ = before.starts_;
  copies_ = before.copies_;
  copied_bytes_ = before.copied_bytes_;
  placements_ = before.placements_;
  placed_bytes_ = before.placed_bytes_;
  for (size_t i = 0; i < parameters().size(); ++i) {
    const auto leaf = parameters()[i]->full();
    front.mark(leaf);
    if (i < storages_.size()) watches_.push_back(front.watch(leaf, FrontEndCallbacks::Role::full));
  }
}

} // namespace shardwise::group
