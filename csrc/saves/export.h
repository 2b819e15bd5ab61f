#pragma once

#include "saves/ranks.h"

#include <shardwise/export.h>
#include <shardwise/state_dict.h>

#include <string>

namespace shardwise::saves {

/// Before tensors are gathered for one file: raises, on all ranks, Error if they name different files, and
/// ValueError if the first rank cannot write one there.
SHARDWISE_API void check_export(const Ranks& ranks, const std::string& file);

/// The first rank writes these whole tensors, which may lie on a device.
/// Raises, on all ranks, what files::write_whole_file() raises.
SHARDWISE_API void export_tensors(const Ranks& ranks, const std::string& file, const StateDict& whole);

} // namespace shardwise::saves
