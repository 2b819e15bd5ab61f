#pragma once

#include "comm/environment.h"

#include <shardwise/mesh.h>

#include <vector>

namespace shardwise::comm {

/// Which rank of how many this is, by the options' store or by the environment. Raises ValueError.
Environment place_of(const MeshOptions& options);
/// Raises ValueError for axes that no mesh can have.
void check_axes(const std::vector<Axis>& axes);

} // namespace shardwise::comm
