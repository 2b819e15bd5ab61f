#pragma once

#include "files/disk.h"

#include <cstdint>
#include <string>
#include <vector>

namespace shardwise::files {

/// Writes a checkpoint's tensors whole to a new folder, as Hugging Face's libraries read them: model.safetensors, or
/// several files with an index where they have more than `most_bytes` together. Names that begin with one of these
/// words are left out. Holds the tensors of one file in memory. Nothing is seen at the folder before all is written.
/// Returns the names of its files.
/// Raises ValueError where something lies at `to`, and what SavedFolder raises.
SHARDWISE_API std::vector<std::string> merge_checkpoint(
    Disk& disk, const std::string& from, const std::string& to, const std::vector<std::string>& without,
    int64_t most_bytes);

} // namespace shardwise::files
