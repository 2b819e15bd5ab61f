#include "saves/module_pieces.h"

#include <algorithm>

namespace shardwise::saves {
namespace {

using files::Box;
using files::Sizes;

/// Along a dimension of the tensor itself; or a range of its elements, which is what is cut in the layout `flat`.
std::vector<Box> boxes_of(const layout::Cut& cut, int64_t rank, const Sizes& sizes) {
  if (cut.shape == sizes && !sizes.empty()) {
    auto box = Box::whole(sizes);
    box.offsets[static_cast<size_t>(cut.dim)] = cut.starts[static_cast<size_t>(rank)];
    box.sizes[static_cast<size_t>(cut.dim)] = cut.length(rank);
    return {box};
  }
  return files::boxes_of_range(sizes, cut.starts[static_cast<size_t>(rank)], cut.length(rank));
}

/// Boxes of this rank's piece of a divided parameter, as boxes of the whole, whose elements come in the same order.
void add_in_whole(const Box& box, const split::SplitParameter& split, std::vector<Box>& whole) {
  const auto dim = static_cast<size_t>(split.dim);
  std::vector<Box> cut;
  int64_t start = 0;
  for (const auto& range : split.pieces.ranges(split.axis->rank())) {
    const auto first = std::max(box.offsets[dim], start);
    const auto last = std::min(box.offsets[dim] + box.sizes[dim], start + range.length);
    if (first < last) {
      cut.push_back(box);
      cut.back().offsets[dim] = range.start + first - start;
      cut.back().sizes[dim] = last - first;
    }
    start += range.length;
  }
  const bool is_in_order =
      cut.size() < 2 ||
      std::all_of(box.sizes.begin(), box.sizes.begin() + split.dim, [](auto size) { return size == 1; });
  if (is_in_order) {
    whole.insert(whole.end(), cut.begin(), cut.end());
    return;
  }
  // Each range has a part of every row.
  auto row = box;
  row.sizes[0] = 1;
  for (int64_t i = 0; i < box.sizes[0]; ++i, ++row.offsets[0]) add_in_whole(row, split, whole);
}

std::vector<Box> boxes_of(const nn::ModuleState::Entry& entry) {
  auto sizes = entry.sizes;
  if (entry.split) sizes[static_cast<size_t>(entry.split->dim)] = entry.split->pieces.length(entry.split->axis->rank());
  auto here = entry.copies == nullptr ? std::vector<Box>{Box::whole(sizes)}
                                      : boxes_of(entry.copies->cut(entry.index), entry.copies->rank(), sizes);
  if (!entry.split) return here;
  std::vector<Box> whole;
  for (const auto& box : here) {
    // A box without elements stays one.
    if (box.numel() > 0) add_in_whole(box, *entry.split, whole);
  }
  if (whole.empty()) {
    whole.push_back(Box::whole(entry.sizes));
    whole.back().sizes.assign(whole.back().sizes.size(), 0);
  }
  return whole;
}

} // namespace

Piece piece_like(const nn::ModuleState::Entry& entry, std::string name, at::Tensor values) {
  if (entry.copies == nullptr && !entry.split) {
    return whole_piece(std::move(name), std::move(values), entry.is_parameter);
  }
  return {std::move(name), entry.sizes, boxes_of(entry), std::move(values), false};
}

Piece whole_piece(std::string name, at::Tensor values, bool must_agree) {
  const auto sizes = values.sizes().vec();
  return {std::move(name), sizes, {Box::whole(sizes)}, std::move(values), must_agree};
}

std::vector<Piece> pieces_of(const nn::ModuleState& module) {
  std::vector<Piece> pieces;
  for (const auto& [name, index] : module.names()) {
    const auto& entry = module.entries()[index];
    pieces.push_back(piece_like(entry, name, entry.tensor));
  }
  return pieces;
}

std::vector<Piece> pieces_of(
    const std::vector<optim::NamedParameter>& parameters, const optim::OptimizerState& optimizer) {
  std::vector<Piece> pieces;
  for (const auto& parameter : parameters) {
    const auto state = optimizer.get(parameter.entry.tensor);
    for (const auto& item : state.tensors) {
      pieces.push_back(piece_like(parameter.entry, files::kOptimizer + parameter.state_key(item.key()), item.value()));
    }
    for (const auto& item : state.numbers) {
      pieces.push_back(whole_piece(files::kOptimizer + parameter.state_key(item.key()), item.value()));
    }
    for (const auto& item : optimizer.options(parameter.group)) {
      pieces.push_back(whole_piece(files::kOptimizer + parameter.option_key(item.key()), item.value()));
    }
  }
  return pieces;
}

} // namespace shardwise::saves
