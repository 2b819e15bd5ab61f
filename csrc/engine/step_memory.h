#pragma once

#include "engine/step_walk.h"

#include <shardwise/detail/export.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardwise::engine {

/// The most that the pool, whole gradients and GroupBytes::sum take together, in forward and in backward.
struct StepPeaks {
  int64_t forward = 0;
  int64_t backward = 0;
  /// The most that whole gradients take alone.
  int64_t unsummed_gradients = 0;
  /// What the pool keeps at the end of a step.
  int64_t pool = 0;
};

/// Simulates steps in the engine's order (engine/order.h), with each sum done at the next event, until nothing changes
/// any more. `keeps_idle`: the pool keeps what is not in use, as on a device; if not, that counts as free.
SHARDWISE_API StepPeaks walk_steps(
    const std::vector<UnitBytes>& units, const std::vector<StepEvent>& forward, size_t sums_in_flight = 1,
    bool keeps_idle = true);

} // namespace shardwise::engine
