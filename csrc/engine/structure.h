#pragma once

#include "comm/collectives/collectives.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace shardwise::engine {

/// What one rank found out about its parameters that all ranks have to know.
struct Sighting {
  /// The number of the first parameter whose memory something else shares; -1: none.
  int64_t shared = -1;
  /// Whether there are parameters that only registries hold.
  bool unheld = false;
};

/// Compares `lines`, one for each parameter, with those of the other ranks along these axes. All ranks must call it. If
/// the lines differ, all raise the same Error, which quotes the first difference. Returns what each rank saw.
std::vector<Sighting> compare_structure(
    const std::vector<std::string>& lines, const Sighting& seen, const std::vector<comm::Collectives>& axes,
    int64_t rank, at::Device device, Counters& counters);

/// For each of several yes-or-no questions, the same on all ranks: whether any rank says yes.
std::vector<bool> any_of_ranks(
    const std::vector<bool>& mine, const std::vector<comm::Collectives>& axes, at::Device device, Counters& counters);

} // namespace shardwise::engine
