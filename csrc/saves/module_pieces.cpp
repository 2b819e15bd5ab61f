#include "saves/module_pieces.h"

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

} // namespace

Piece piece_like(const nn::ModuleState::Entry& entry, std::string name, at::Tensor values) {
  if (entry.copies == nullptr) return whole_piece(std::move(name), std::move(values), entry.is_parameter);
  auto boxes = boxes_of(entry.copies->cut(entry.index), entry.copies->rank(), entry.sizes);
  return {std::move(name), entry.sizes, std::move(boxes), std::move(values), false};
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
      pieces.push_back(piece_like(parameter.entry, kOptimizer + parameter.state_key(item.key()), item.value()));
    }
    for (const auto& item : state.numbers) {
      pieces.push_back(whole_piece(kOptimizer + parameter.state_key(item.key()), item.value()));
    }
    for (const auto& item : optimizer.options(parameter.group)) {
      pieces.push_back(whole_piece(kOptimizer + parameter.option_key(item.key()), item.value()));
    }
  }
  return pieces;
}

} // namespace shardwise::saves
