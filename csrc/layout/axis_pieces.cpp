#include "layout/axis_pieces.h"

#include <shardwise/error.h>

#include <algorithm>
#include <string>

namespace shardwise::layout {

AxisPieces::AxisPieces(int64_t size, int64_t ranks, int64_t segments, int64_t unit) {
  if (ranks < 1 || segments < 1 || unit < 1 || size < 0 || size % (segments * unit) != 0) {
    throw ValueError(
        "shardwise: a dimension of " + std::to_string(size) + " places cannot be divided among " +
        std::to_string(ranks) + " ranks in " + std::to_string(segments) + " segments of whole units of " +
        std::to_string(unit) + " places: the size must be a multiple of segments and units.");
  }
  segment_ = size / segments;
  segments_ = segments;
  const auto units = segment_ / unit;
  const auto chunk = (units + ranks - 1) / ranks;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto start = std::min(rank * chunk, units);
    const auto end = std::min(start + chunk, units);
    of_rank_.push_back({start * unit, (end - start) * unit});
  }
}

std::vector<Range> AxisPieces::ranges(int64_t rank) const {
  std::vector<Range> all;
  const auto& first = of_rank_[static_cast<size_t>(rank)];
  for (int64_t i = 0; i < segments_; ++i) all.push_back({i * segment_ + first.start, first.length});
  return all;
}

AxisPieces AxisPieces::some(int64_t count) const {
  auto result = *this;
  result.segments_ = count;
  return result;
}

} // namespace shardwise::layout
