#pragma once

#include "checkpoint/ranks.h"
#include "nn/module_state.h"

#include <shardwise/mesh.h>

#include <optional>

namespace shardwise::checkpoint {

/// The ranks that save or load a module together: those of its units, or of `mesh` if the caller names one. `function`
/// is what is being called.
/// Raises ValueError if its units lie on meshes of other ranks, whose parameters of one name need not be one tensor.
Ranks ranks_of(const nn::ModuleState& module, const std::optional<Mesh>& mesh, const std::string& function);

} // namespace shardwise::checkpoint
