#pragma once

#include "files/marker.h"
#include "files/owner.h"
#include "files/tensor_writer.h"

#include <string>
#include <vector>

namespace shardwise::files {

/// A checkpoint that is being written. One rank begins it and commits it; all of them write their files into its folder
/// in between. Until the commit no reader finds it, and the checkpoint at its place stays as it is.
struct Saving {
  /// The path of the finished checkpoint.
  std::string place;
  /// The path of the folder that is being written, beside that.
  std::string folder;
  Owner owner;
};

/// Makes a folder to write to beside this place, and missing folders above it. Removes leftovers of processes that have
/// ended.
std::string make_temporary_folder(Disk& disk, const std::string& place, const Owner& owner);

/// Makes the folder to write to, as make_temporary_folder().
/// Raises ValueError if the place holds anything but a checkpoint of ours; DiskError if the disk fails.
SHARDWISE_API Saving begin_saving(Disk& disk, const std::string& place);

/// Writes one rank's tensors into that folder, and waits until they will survive a loss of power. Pieces of one tensor
/// go to different files. `shard` is the rank's number, from 1 on, in the names of its files.
SHARDWISE_API std::vector<FileRecord> write_shard(
    Disk& disk, const std::string& folder, int64_t shard, const std::vector<TensorToWrite>& tensors);

/// Makes it the checkpoint of its place, once all ranks have written: `marker` has the records of all of them. When it
/// returns, the checkpoint will survive a loss of power, and the one before is gone. If it raises, or the machine
/// crashes, the one before or the new one is there, whole.
/// Raises Error if a file is not in the folder as its rank recorded it; DiskError if the disk fails.
SHARDWISE_API void commit_saving(Disk& disk, const Saving& saving, Marker marker);

/// After an error: removes what was written. Never touches what lies at the place. What it cannot remove stays as a
/// leftover.
SHARDWISE_API void abandon_saving(Disk& disk, const Saving& saving);

} // namespace shardwise::files
