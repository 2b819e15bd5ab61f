#pragma once

#include "files/disk.h"
#include "files/marker.h"
#include "files/owner.h"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace shardwise::files {

/// What a folder beside a checkpoint's place is for: one that is being written, that another one is replacing, or that
/// is being removed.
enum class TemporaryKind { saving, replaced, removing };

/// The folder's path, such as step-10.saving-OWNER.
SHARDWISE_API std::string temporary_path(const std::string& place, TemporaryKind kind, const Owner& owner);

/// Such a folder's name.
struct TemporaryName {
  /// The name of the checkpoint's place.
  std::string place;
  TemporaryKind kind = TemporaryKind::saving;
  Owner owner;
};
/// Nothing where this is not the name of one.
SHARDWISE_API std::optional<TemporaryName> parse_temporary_name(std::string_view name);

/// Whether this folder has a marker and all files that it names, with their sizes.
/// Raises DiskError where the disk cannot tell.
SHARDWISE_API bool is_complete(Disk& disk, const std::string& folder);

/// The folder of the checkpoint of this place: the place; or, if a save was about to replace it and died, a folder
/// beside it. Raises Error if there is none, or if it may be one of several.
SHARDWISE_API std::string find_checkpoint(Disk& disk, const std::string& place);

/// Raises ValueError where something lies at this place that a checkpoint cannot replace: a file, a link, or a folder
/// with files that are not those of a checkpoint of ours, which would be lost.
SHARDWISE_API void check_replaceable(Disk& disk, const std::string& place);

/// Whether a folder has files of a checkpoint of ours and nothing else, so that nothing of others goes with it.
SHARDWISE_API bool is_ours(Disk& disk, const std::string& folder);

/// Removes the files of a checkpoint, its marker first, and the folder, to which ranks may still be writing: what they
/// begin later fails, since the folder is gone. It must be a temporary one.
SHARDWISE_API void remove_temporary_folder(Disk& disk, const std::string& folder);

/// A folder beside checkpoints that a save or a removal left behind, or is still at work on.
struct Leftover {
  std::string path;
  TemporaryName name;
  /// Whether its process has surely ended.
  bool is_dead = false;
};

/// The leftovers in a folder of checkpoints.
SHARDWISE_API std::vector<Leftover> leftovers(Disk& disk, const std::string& root);

/// Removes those that are dead, and returns their paths. One that was being replaced is put back where nothing is at
/// its place, and stays where its place has no complete checkpoint. What cannot be removed stays, too.
SHARDWISE_API std::vector<std::string> remove_dead_leftovers(Disk& disk, const std::string& root);

} // namespace shardwise::files
