#pragma once

#include "saves/ranks.h"

#include <shardwise/mesh.h>

#include <string>

namespace shardwise::saves {

/// All ranks of a mesh. `function` is what is being called.
SHARDWISE_API Ranks ranks_on(const Mesh& mesh, const std::string& function);
/// The same, over process groups that nothing else uses, so that a thread may talk to the others' threads.
/// Raises Error where the groups are the caller's and have no store.
SHARDWISE_API Ranks ranks_beside(const Mesh& mesh);

} // namespace shardwise::saves
