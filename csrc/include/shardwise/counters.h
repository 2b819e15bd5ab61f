#pragma once

#include <cstdint>

namespace shardwise {

/// What a unit and the units below it have done since they were made.
struct Counters {
  int64_t backwards = 0;
  int64_t all_reduces = 0;
  int64_t broadcasts = 0;
  int64_t all_gathers = 0;
  /// Bytes handed to collectives by this rank.
  int64_t collective_bytes = 0;
  /// Bytes of gradients copied into buckets.
  int64_t copied_bytes = 0;
  /// Buckets allocated.
  int64_t allocations = 0;
};

} // namespace shardwise
