#pragma once

#include "checkpoint/division.h"
#include "files/marker.h"

#include <string>
#include <vector>

namespace shardwise::checkpoint {

/// Writes a checkpoint of what all ranks have to `place`, which all of them see. `about` has the program's values and
/// the layout. Returns when it will survive a loss of power. If it raises on one rank it raises on all, and what was at
/// the place stays.
/// Raises what divide() and files/saving.h raise.
SHARDWISE_API void save_pieces(
    const Ranks& ranks, files::Disk& disk, const std::string& place, const std::vector<Piece>& pieces,
    files::Marker about);

} // namespace shardwise::checkpoint
