#pragma once

#include "files/tensor_writer.h"

#include <cstdint>
#include <string>
#include <vector>

namespace shardwise::files {

/// Writes a checkpoint's tensors whole to a new folder, as Hugging Face's libraries read them: model.safetensors, or
/// several files with an index if they have more than `most_bytes` together. Names that begin with one of these
/// words are left out. It needs memory for the tensors of one file. The folder appears once all is written.
/// Returns the names of its files.
/// Raises ValueError if something lies at `to`, and what SavedFolder raises.
SHARDWISE_API std::vector<std::string> merge_checkpoint(
    Disk& disk, const std::string& from, const std::string& to, const std::vector<std::string>& without,
    int64_t most_bytes);

/// Raises ValueError if something else than a file lies there.
SHARDWISE_API void check_file_place(Disk& disk, const std::string& file);

/// Writes whole tensors to one file, as Hugging Face's libraries read them. The file appears once all of it will
/// survive a loss of power, and replaces an earlier one.
/// Raises what check_file_place() and write_tensor_file() raise.
SHARDWISE_API void write_whole_file(Disk& disk, const std::string& file, const std::vector<TensorToWrite>& tensors);

} // namespace shardwise::files
