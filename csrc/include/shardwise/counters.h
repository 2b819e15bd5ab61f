#pragma once

#include <shardwise/detail/export.h>

#include <array>
#include <cstdint>
#include <string_view>

namespace shardwise {

/// What a unit and the units below it have done since they were made.
struct SHARDWISE_API Counters {
  /// Backwards that reached the unit.
  int64_t backwards = 0;
  ///@{
  /// Collectives of this kind that this rank started.
  int64_t all_reduces = 0;
  int64_t broadcasts = 0;
  int64_t all_gathers = 0;
  int64_t reduce_scatters = 0;
  ///@}
  /// Bytes handed to collectives by this rank.
  int64_t collective_bytes = 0;
  /// How often the ranks compared their units (see docs/architecture/ranks.md). A steady program compares no more.
  int64_t comparisons = 0;
  /// How often full parameters were gathered.
  int64_t unshards = 0;
  /// How often they were freed again.
  int64_t reshards = 0;
  /// Bytes of gradients copied into buckets.
  int64_t copied_bytes = 0;
  /// Bytes copied from gathered buffers into full parameters.
  int64_t unsharded_bytes = 0;
  /// Pieces of memory allocated, for full parameters, gathers and gradients.
  int64_t allocations = 0;

  /// Adds up all counters but `backwards`, of which it keeps the larger one.
  Counters& operator+=(const Counters& other);
};

namespace detail {

struct Counter {
  std::string_view name;
  int64_t Counters::*of;
};

/// All counters, under the names that they have in Python and in the benchmarks.
inline constexpr std::array<Counter, 12> kCounters{{
    {"backwards", &Counters::backwards},
    {"all_reduces", &Counters::all_reduces},
    {"broadcasts", &Counters::broadcasts},
    {"all_gathers", &Counters::all_gathers},
    {"reduce_scatters", &Counters::reduce_scatters},
    {"collective_bytes", &Counters::collective_bytes},
    {"comparisons", &Counters::comparisons},
    {"unshards", &Counters::unshards},
    {"reshards", &Counters::reshards},
    {"copied_bytes", &Counters::copied_bytes},
    {"unsharded_bytes", &Counters::unsharded_bytes},
    {"allocations", &Counters::allocations},
}};

} // namespace detail

} // namespace shardwise
