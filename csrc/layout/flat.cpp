#include "layout/flat.h"

#include <shardwise/error.h>

#include <string>

namespace shardwise::layout {

Flat flat(std::span<const int64_t> numels, int64_t alignment) {
  if (alignment < 1) {
    throw ValueError(
        "shardwise: the alignment of a flat layout is " + std::to_string(alignment) + "; it must be 1 or more.");
  }
  Flat result;
  result.offsets.reserve(numels.size());
  for (const auto numel : numels) {
    if (numel < 0) {
      throw ValueError("shardwise: a tensor of " + std::to_string(numel) + " elements cannot be laid out.");
    }
    result.offsets.push_back(result.total);
    result.total += (numel + alignment - 1) / alignment * alignment;
  }
  return result;
}

} // namespace shardwise::layout
