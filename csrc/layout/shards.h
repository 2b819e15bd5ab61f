#pragma once

#include <shardwise/detail/export.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardwise::layout {

/// How one parameter is divided among the ranks. Viewed with sizes `shape`, rank r holds the range from starts[r] to
/// starts[r + 1] along dimension `dim`. This piece lies at offsets[r] in rank r's part, row-major, and may be empty.
struct SHARDWISE_API Cut {
  std::vector<int64_t> shape;
  int64_t dim = 0;
  /// One entry more than there are ranks.
  std::vector<int64_t> starts;
  std::vector<int64_t> offsets;

  int64_t length(int64_t rank) const {
    return starts[rank + 1] - starts[rank];
  }
  std::vector<int64_t> piece_sizes(int64_t rank) const;
  int64_t piece_numel(int64_t rank) const;
};

/// The places of a group's parameters in `world` parts, one per rank, of `part` elements each. Every element of every
/// parameter lies in exactly one part; pieces do not overlap.
struct Shards {
  std::vector<Cut> cuts;
  int64_t part = 0;
  int64_t world = 1;
};

/// The bytes that a tensor takes in memory that several share.
constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + 127) / 128 * 128;
}

/// The alignment of parameters and gradients, in elements of this size.
SHARDWISE_API int64_t alignment(int64_t bytes_of_element);

/// The elements of a part and of `counts` numbers behind it, so that parts that follow one another are all aligned.
SHARDWISE_API int64_t with_counts(const Shards& shards, std::size_t counts, int64_t alignment);

/// Each parameter is cut along its dimension as torch.chunk does; pieces start at multiples of `alignment` elements.
/// With a world of one this is where whole parameters lie in a bucket.
/// Raises ValueError for a dimension that a tensor does not have.
SHARDWISE_API Shards rows(
    const std::vector<std::vector<int64_t>>& shapes, const std::vector<int64_t>& dims, int64_t world,
    int64_t alignment);

/// The parameters lie one after the other in one vector, each at a multiple of `alignment`, and the vector is cut into
/// equal parts. So a piece is a range of a parameter's elements, and the parts of all ranks put together are the whole
/// vector.
SHARDWISE_API Shards flat(const std::vector<std::vector<int64_t>>& shapes, int64_t world, int64_t alignment);

/// Only the chosen parameters: each rank holds the same pieces of them as before, packed together.
SHARDWISE_API Shards some_of(const Shards& shards, const std::vector<std::size_t>& chosen, int64_t alignment);

} // namespace shardwise::layout
