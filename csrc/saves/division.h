#pragma once

#include "files/box.h"
#include "saves/ranks.h"

#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::saves {

/// A rank's part of a tensor of a checkpoint.
struct Piece {
  std::string name;
  /// The sizes of the whole tensor.
  files::Sizes sizes;
  /// Which part of it this rank has: boxes whose elements, one box after the other, are those of `values`. A shard of
  /// the layout `flat` is a range of elements, which takes several.
  std::vector<files::Box> boxes;
  /// On any device.
  at::Tensor values;
  /// Whether all ranks that have a box of it must have the same values, as copies of a parameter do: some are compared.
  bool must_agree = false;
};

/// A box of one of this rank's pieces: the index of the piece, and that of the box in it.
using BoxOfPiece = std::pair<size_t, size_t>;

/// Divides the writing among ranks: one of them writes a box that several have, so that each writes about as many
/// bytes. It remembers the division, so ranks that have the same again say only that.
class SHARDWISE_API Division {
 public:
  /// What this rank writes. `label` is what else the ranks must have in common; it may raise.
  /// Raises Error, the same on all ranks, with the tensor's name if ranks have different sizes or dtypes of it, or
  /// boxes that together do not hold every element once.
  const std::vector<BoxOfPiece>& among(
      const Ranks& ranks, const std::vector<Piece>& pieces, const std::function<std::string()>& label);

 private:
  /// What this rank said the last time, empty if there was none; a checksum of what all ranks said; and what came of
  /// it.
  std::string described_;
  uint64_t of_all_ = 0;
  std::vector<BoxOfPiece> mine_;
};

} // namespace shardwise::saves
