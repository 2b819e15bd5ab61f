#pragma once

#include <shardwise/export.h>

#include <cstdint>
#include <span>
#include <vector>

namespace shardwise::layout {

/// Where the tensors of a group lie in one vector: one after the other, each at a multiple of `alignment` elements.
struct Flat {
  std::vector<int64_t> offsets;
  /// Elements of the whole vector: a multiple of the alignment.
  int64_t total = 0;
  bool operator==(const Flat&) const = default;
};

/// Raises ValueError for a negative size or an alignment below 1.
SHARDWISE_API Flat flat(std::span<const int64_t> numels, int64_t alignment);

} // namespace shardwise::layout
