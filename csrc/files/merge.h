#pragma once

#include "files/tensor_writer.h"

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

/// Raises ValueError where one file of tensors cannot lie there: where anything but a file does.
SHARDWISE_API void check_file_place(Disk& disk, const std::string& file);

/// Writes whole tensors to one file, as Hugging Face's libraries read them; one that was there is replaced. Nothing is
/// seen there before all is written and will survive a loss of power.
/// Raises what check_file_place() and write_tensor_file() raise.
SHARDWISE_API void write_whole_file(Disk& disk, const std::string& file, const std::vector<TensorToWrite>& tensors);

} // namespace shardwise::files
