#pragma once

#include "files/marker.h"
#include "nn/state/module_state.h"
#include "saves/division.h"
#include "saves/ranks.h"

#include <shardwise/save.h>
#include <shardwise/state_dict.h>

#include <optional>
#include <string>
#include <vector>

namespace shardwise::saves {

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

/// Before tensors are gathered for one file: raises, on all ranks, Error if they name different files, and
/// ValueError if the first rank cannot write one there.
SHARDWISE_API void check_export(const Ranks& ranks, const std::string& file);

/// The first rank writes these whole tensors, which may lie on a device.
/// Raises, on all ranks, what files::write_whole_file() raises.
SHARDWISE_API void export_tensors(const Ranks& ranks, const std::string& file, const StateDict& whole);

} // namespace shardwise::saves
