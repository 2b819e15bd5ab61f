#pragma once

#include <shardwise/export.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardwise::layout {

/// How one parameter is cut among the ranks: seen with the sizes `shape`, rank r holds what lies between starts[r] and
/// starts[r + 1] along dimension `dim`; its piece stands at offsets[r] of its part, row-major. A piece may be empty.
struct SHARDWISE_API Cut {
  std::vector<int64_t> shape;
  int64_t dim = 0;
  /// One more than there are ranks.
  std::vector<int64_t> starts;
  std::vector<int64_t> offsets;

  int64_t length(int64_t rank) const {
    return starts[rank + 1] - starts[rank];
  }
  std::vector<int64_t> piece_sizes(int64_t rank) const;
  int64_t piece_numel(int64_t rank) const;
};

/// Where the parameters of a group lie in `world` parts of `part` elements each, one a rank. Every element of every
/// parameter lies in exactly one rank's part; pieces do not overlap.
struct Shards {
  std::vector<Cut> cuts;
  int64_t part = 0;
  int64_t world = 1;
};

/// What full parameters and such take of a piece of memory that several share.
constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + 127) / 128 * 128;
}

/// At how many elements of this size parameters and gradients begin.
SHARDWISE_API int64_t alignment(int64_t bytes_of_element);

/// Each parameter is cut along its dimension as torch.chunk does; pieces start at multiples of `alignment` elements.
/// With a world of one this is where whole parameters lie in a bucket.
/// Raises ValueError for a bad dimension, size, world or alignment.
SHARDWISE_API Shards rows(
    const std::vector<std::vector<int64_t>>& shapes, const std::vector<int64_t>& dims, int64_t world,
    int64_t alignment);

/// The parameters stand one after the other in one vector, which is cut into equal parts: a piece is any range of
/// elements, and parts that follow one another are the parameters themselves, each at a multiple of `alignment`.
SHARDWISE_API Shards flat(const std::vector<std::vector<int64_t>>& shapes, int64_t world, int64_t alignment);

/// Some of the parameters alone: each rank holds the same pieces of them as before, closer together.
SHARDWISE_API Shards some_of(const Shards& shards, const std::vector<std::size_t>& chosen, int64_t alignment);

} // namespace shardwise::layout
