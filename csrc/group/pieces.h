#pragma once

#include "layout/shards.h"

#include <ATen/core/Tensor.h>

namespace shardwise::group {

/// The piece of a whole parameter that a rank holds: a view where the parameter is contiguous.
at::Tensor piece_of(const at::Tensor& whole, const layout::Cut& cut, int64_t rank);

/// A view of a rank's piece of a parameter, in the part of that rank, which begins at element `start` of `parts`.
at::Tensor piece_in(const at::Tensor& parts, const layout::Cut& cut, int64_t rank, int64_t start);

} // namespace shardwise::group
