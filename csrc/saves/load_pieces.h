#pragma once

#include "files/saved_folder.h"
#include "saves/piece.h"
#include "saves/ranks.h"

#include <shardwise/export.h>

namespace shardwise::saves {

/// Opens a checkpoint on all ranks, which must name the same folder and find what the same save wrote.
/// Raises, on all ranks, Error where they do not, and what files::SavedFolder raises.
SHARDWISE_API files::SavedFolder open_checkpoint(const Ranks& ranks, const std::string& folder);

/// What this rank has of a tensor, as the checkpoint has it: new memory on the host, in the sizes of `piece.values`,
/// which is only looked at. Of files only what is needed is read.
/// Raises what files::SavedFolder::read() raises.
SHARDWISE_API at::Tensor read_piece(files::SavedFolder& folder, const Piece& piece);

/// All of a tensor.
SHARDWISE_API at::Tensor read_whole(files::SavedFolder& folder, const std::string& name);

} // namespace shardwise::saves
