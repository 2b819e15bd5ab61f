#pragma once

#include "layout/shards.h"

#include <ATen/core/Tensor.h>

namespace shardwise::group {

/// The piece of a whole parameter that a rank holds: a view where the parameter is contiguous.
at::Tensor piece_of(const at::Tensor& whole, const layout::Cut& cut, int64_t rank);

/// A view of the piece of a parameter that starts at its offset in the part of a rank; `start` is where the part does.
at::Tensor piece_in(const at::Tensor& parts, const layout::Cut& cut, int64_t rank, int64_t start);

} // namespace shardwise::group
