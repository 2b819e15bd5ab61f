#include "group/unpacking.h"

#include "group/pieces.h"

#include <c10/util/accumulate.h>

#include <algorithm>
#include <utility>

namespace shardwise::group {
namespace {

/// How many sets of moves are kept. A unit gets the same few pairs of buffers: those of its own turn, and those that it
/// gets when others were gathered ahead.
constexpr size_t kMostPlaces = 4;

} // namespace

// Large pieces in one run that CopyBatch leaves to torch.
bool Unpacking::can_place(const layout::Cut& cut, int64_t rank, at::ScalarType dtype) {
  const auto runs = runs_of(cut, rank);
  return c10::multiply_integers(cut.shape) > CopyBatch::kSmall && runs.count == 1 &&
         static_cast<size_t>(runs.length) * c10::elementSize(dtype) >= transport::DirectPlacement::kLeast;
}

Unpacking::Unpacking(const layout::Shards& layout, std::vector<at::Tensor> leaves) : leaves_(std::move(leaves)) {
  for (size_t i = 0; i < leaves_.size(); ++i) {
    const auto& cut = layout.cuts[i];
    const auto is_moved = CopyBatch::takes(leaves_[i]);
    for (int64_t rank = 0; rank < layout.world; ++rank) {
      if (cut.piece_numel(rank) == 0) continue;
      const auto start = rank * layout.part + cut.offsets[rank];
      copies_.push_back({i, runs_of(cut, rank), rank, start, is_moved});
      bytes_ += copies_.back().numel() * static_cast<int64_t>(leaves_[i].itemsize());
    }
  }
  if (layout.world > 1) find_placements(layout);
}

void Unpacking::find_placements(const layout::Shards& layout) {
  if (leaves_.empty() || !leaves_.front().device().is_cpu()) return;
  std::vector<size_t> starts;
  size_t start = 0;
  for (const auto& leaf : leaves_) {
    starts.push_back(start);
    start += layout::aligned(leaf.nbytes());
  }
  const auto item = leaves_.front().itemsize();
  const auto begin_of = [&](const Copy& copy) { return static_cast<size_t>(copy.start) * item; };
  for (auto& copy : copies_) {
    copy.can_place = !copy.is_moved && can_place(layout.cuts[copy.leaf], copy.rank, leaves_[copy.leaf].scalar_type());
    if (!copy.can_place) continue;
    const auto to = starts[copy.leaf] + static_cast<size_t>(copy.runs.start) * item;
    placements_.push_back({begin_of(copy), static_cast<size_t>(copy.numel()) * item, to});
    placed_ += copy.numel();
  }
  const auto before = [](const auto& a, const auto& b) { return a.offset < b.offset; };
  std::sort(placements_.begin(), placements_.end(), before);
  std::vector<size_t> placed_before{0};
  for (const auto& range : placements_) placed_before.push_back(placed_before.back() + range.bytes);
  for (auto& copy : copies_) {
    const transport::DirectPlacement::Range begin{begin_of(copy), 0, 0};
    const auto next = std::lower_bound(placements_.begin(), placements_.end(), begin, before);
    copy.rest = copy.start - static_cast<int64_t>(placed_before[next - placements_.begin()] / item);
  }
}

int64_t Unpacking::run(const at::Tensor& gathered, const at::Tensor& memory, bool is_placed) {
  copy(gathered, memory, is_placed);
  return bytes_ - (is_placed ? placed_ * static_cast<int64_t>(memory.itemsize()) : 0);
}

void Unpacking::copy(const at::Tensor& gathered, const at::Tensor& memory, bool is_placed) {
  const Addresses addresses{gathered.const_data_ptr(), memory.const_data_ptr(), is_placed};
  for (const auto& [known, moves] : known_moves_) {
    if (known == addresses) return moves.run_again();
  }
  CopyBatch moves;
  const bool alike = gathered.dtype() == memory.dtype() && gathered.device() == memory.device();
  bool moves_all = true;
  std::vector<Piece> pieces;
  for (size_t i = 0; i < copies_.size(); ++i) {
    const auto& copy = copies_[i];
    const auto start = is_placed ? copy.rest : copy.start;
    if (is_placed && copy.can_place) {
      // It is there already.
    } else if (alike && copy.is_moved) {
      add_piece(pieces, {copy.runs, start});
    } else {
      moves_all = false;
      const auto& [count, length, stride, first] = copy.runs;
      const auto& leaf = leaves_[copy.leaf];
      view_of(leaf, {count, length}, {stride, 1}, leaf.storage_offset() + first)
          .copy_(view_of(gathered, {count, length}, {length, 1}, gathered.storage_offset() + start));
    }
    if (i + 1 < copies_.size() && copies_[i + 1].leaf == copy.leaf) continue;
    if (!pieces.empty()) moves.put(leaves_[copy.leaf], std::exchange(pieces, {}), gathered);
  }
  if (!moves.run_and_keep() || !moves_all) return;
  if (known_moves_.size() == kMostPlaces) known_moves_.erase(known_moves_.begin());
  known_moves_.emplace_back(addresses, std::move(moves));
}

} // namespace shardwise::group
