#pragma once

#include "files/box.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace shardwise::saves {

/// What a rank has of a tensor of a checkpoint.
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

} // namespace shardwise::saves
