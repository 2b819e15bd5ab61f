#pragma once

#include "engine/step_walk.h"

#include <shardwise/detail/export.h>
#include <shardwise/link.h>

#include <cstdint>
#include <vector>

namespace shardwise::engine {

/// The ranks of a step, and what connects them.
struct StepRanks {
  int64_t shards = 1;
  int64_t copies = 1;
  Links links;
};

/// Seconds of a step: from its begin to its end, and of those of its collectives.
struct StepTime {
  double step = 0;
  double wire = 0;
};

/// How long a step takes in which each rank computes for `compute` seconds, in proportion to StepEvent::work: a third
/// in forward, the rest in backward. Simulates steps in the engine's order (engine/order.h), until nothing changes any
/// more. Collectives go one after the other in the order in which they are called, while ranks compute.
SHARDWISE_API StepTime time_steps(
    const std::vector<UnitBytes>& units, const std::vector<StepEvent>& forward, const StepRanks& ranks, double compute,
    size_t sums_in_flight = 1);

} // namespace shardwise::engine
