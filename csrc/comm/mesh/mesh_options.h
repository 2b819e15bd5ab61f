#pragma once

#include "comm/meet/environment.h"

#include <shardwise/mesh.h>

#include <vector>

namespace shardwise::comm {

/// This rank and the world size, from the options if they have a store, else from the environment. Raises ValueError.
Environment environment_of(const MeshOptions& options);
/// Raises ValueError for axes that are not allowed.
void check_axes(const std::vector<Axis>& axes);

} // namespace shardwise::comm
