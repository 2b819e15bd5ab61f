#pragma once

#include "files/saved_folder.h"
#include "saves/piece.h"

#include <shardwise/export.h>

namespace shardwise::saves {

/// What this rank has of a tensor, as the checkpoint has it: new memory on the host, in the sizes of `piece.values`,
/// which is only looked at. Of files only what is needed is read.
/// Raises what files::SavedFolder::read() raises.
SHARDWISE_API at::Tensor read_piece(files::SavedFolder& folder, const Piece& piece);

/// All of a tensor.
SHARDWISE_API at::Tensor read_whole(files::SavedFolder& folder, const std::string& name);

} // namespace shardwise::saves
