#pragma once

#include "comm/collectives/collectives.h"
#include "layout/axis_pieces.h"

#include <shardwise/detail/export.h>
#include <shardwise/mesh.h>
#include <shardwise/parallelize.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::split {

/// The ranks along which a call of parallelize() divides parameters.
struct SplitAxis {
  Mesh mesh;
  std::string name;
  comm::Collectives ranks;
  mutable Counters counters;

  int64_t rank() const {
    return ranks.rank();
  }
};

/// A parameter of which each rank along an axis has a piece: a leaf with the sizes of the piece.
struct SplitParameter {
  std::string name;
  /// Those of the whole parameter.
  std::vector<int64_t> sizes;
  /// The dimension that is divided, and how.
  int64_t dim;
  layout::AxisPieces pieces;
  std::shared_ptr<const SplitAxis> axis;
  /// How it serves as a matrix, and as the table of an embedding.
  std::optional<Split> matrix;
  std::optional<Split> table;
};

/// A leaf of a SplitParameter, or a view or copy of one, whose dimensions may have changed places.
struct SplitView {
  /// In place of a dimension: it is a view of another kind, or one that was made unseen.
  static constexpr int64_t kUnknown = -1;

  std::shared_ptr<const SplitParameter> parameter;
  int64_t dim;
  layout::AxisPieces pieces;
};

/// From now on the leaf is a piece, and owns `parameter`. The caller gives it the touch key (nn/touch/touch.h), so the
/// trigger notices operations on it; the same for views.
SHARDWISE_API void add_split(const at::Tensor& leaf, const std::shared_ptr<const SplitParameter>& parameter);
/// From now on this tensor is known as a view or copy of one.
void add_split_view(const at::Tensor& tensor, const SplitView& view);

/// The leaf of one is about to get other memory.
void split_moved();

/// Whether this process has ever split a parameter.
bool any_split();
/// Null for a tensor that is not the leaf of a split parameter.
SHARDWISE_API std::shared_ptr<const SplitParameter> split_parameter_of(const at::Tensor& leaf);
/// What a tensor with the touch key is of a split parameter; nothing if it is not of one.
std::optional<SplitView> find_split(const at::Tensor& tensor);

} // namespace shardwise::split
