#pragma once

#include "files/marker.h"
#include "nn/state/module_state.h"
#include "saves/division.h"
#include "saves/ranks.h"

#include <shardwise/save.h>

#include <optional>
#include <string>
#include <vector>

namespace shardwise::saves {

/// What is wrong with a name of the module that would look like another part of a checkpoint; "" if none does.
/// `function` is what is being called.
std::string reserved_name(const nn::ModuleState& module, const std::string& function);

/// What a save of a module has.
struct ModuleSave {
  /// Unset for a module that this rank saves alone.
  std::optional<Mesh> mesh;
  Ranks ranks;
  std::vector<Piece> pieces;
  files::Marker about;
};

/// Gathers it. All ranks call it. `optimizer` may be null.
/// Raises what shardwise::save() raises for what cannot be saved.
SHARDWISE_API ModuleSave
module_save(const torch::nn::Module& module, torch::optim::Optimizer* optimizer, const SaveOptions& options);

} // namespace shardwise::saves
