#pragma once

#include "nn/state/module_state.h"
#include "saves/ranks.h"

#include <shardwise/mesh.h>

#include <optional>

namespace shardwise::saves {

/// The mesh whose ranks save or load a module together: that of its units, or `mesh` if the caller names one; nothing
/// for a module without units, which is this rank's own. `function` is what is being called.
/// Raises ValueError if its units lie on meshes of other ranks, whose parameters of one name need not be one tensor.
std::optional<Mesh> mesh_of(
    const nn::ModuleState& module, const std::optional<Mesh>& mesh, const std::string& function);

/// These ranks.
Ranks ranks_of(const nn::ModuleState& module, const std::optional<Mesh>& mesh, const std::string& function);
} // namespace shardwise::saves
