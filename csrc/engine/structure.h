#pragma once

#include "comm/collectives.h"

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace shardwise::engine {

/// Compares `lines`, one a parameter, with those of the other ranks along these axes. All ranks must call it; all raise
/// the same Error, with the first line that differs, when they are not the same everywhere.
void compare_structure(
    const std::vector<std::string>& lines, const std::vector<comm::Collectives>& axes, int64_t rank, at::Device device,
    Counters& counters);

} // namespace shardwise::engine
