#pragma once

#include "comm/collectives.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace shardwise::engine {

/// What one rank saw at its parameters that all must hear of.
struct Sighting {
  /// The number of the first one whose memory others share; -1: none.
  int64_t shared = -1;
  /// Whether there are parameters that nothing but registries holds.
  bool unheld = false;
};

/// Compares `lines`, one a parameter, with those of the other ranks along these axes. All ranks must call it; all raise
/// the same Error, with the first line that differs, when they are not the same everywhere. Returns what each rank saw.
std::vector<Sighting> compare_structure(
    const std::vector<std::string>& lines, const Sighting& seen, const std::vector<comm::Collectives>& axes,
    int64_t rank, at::Device device, Counters& counters);

/// Which of so many yes-or-no answers, the same number on all ranks, are yes on any of them.
std::vector<bool> any_of_ranks(
    const std::vector<bool>& mine, const std::vector<comm::Collectives>& axes, at::Device device, Counters& counters);

} // namespace shardwise::engine
