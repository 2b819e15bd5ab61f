#pragma once

#include <shardwise/detail/export.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardwise::layout {

/// Some places in a row along a dimension.
struct Range {
  int64_t start = 0;
  int64_t length = 0;
  bool operator==(const Range&) const = default;
};

/// How one dimension of a tensor is divided among ranks. It consists of segments of equal length, and each rank has a
/// piece of every segment, one after the other. Segments are cut as torch.chunk cuts, so the last ranks may have less,
/// or nothing.
class SHARDWISE_API AxisPieces {
 public:
  /// Pieces are multiples of `unit` places. Raises ValueError unless segments of whole units fill the dimension.
  AxisPieces(int64_t size, int64_t ranks, int64_t segments = 1, int64_t unit = 1);

  int64_t size() const {
    return segment_ * segments_;
  }
  int64_t segments() const {
    return segments_;
  }
  /// How many places a rank has.
  int64_t length(int64_t rank) const {
    return segments_ * of_rank_[static_cast<size_t>(rank)].length;
  }
  /// Which of the whole dimension a rank has, in the order of its piece: one range for each segment.
  std::vector<Range> ranges(int64_t rank) const;
  /// Those of the first `count` segments.
  AxisPieces some(int64_t count) const;
  bool operator==(const AxisPieces&) const = default;

 private:
  int64_t segment_;
  int64_t segments_;
  /// Of the first segment.
  std::vector<Range> of_rank_;
};

} // namespace shardwise::layout
