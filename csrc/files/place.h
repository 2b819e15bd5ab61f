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
/// Nothing if this is not the name of such a folder.
SHARDWISE_API std::optional<TemporaryName> parse_temporary_name(std::string_view name);

/// Whether this folder has a marker and all files that it names, with their sizes.
/// Raises DiskError if the disk cannot tell.
SHARDWISE_API bool is_complete(Disk& disk, const std::string& folder);

/// The folder of the checkpoint of this place: the place; or, if a save was about to replace it and died, a folder
/// beside it. Raises Error if there is none, or if it may be one of several.
SHARDWISE_API std::string find_checkpoint(Disk& disk, const std::string& place);

/// Raises ValueError if something lies at this place that a checkpoint cannot replace: a file, a link, or a folder
/// with files that do not belong to a checkpoint of ours, which would be lost.
SHARDWISE_API void check_replaceable(Disk& disk, const std::string& place);

/// Whether a folder has only files of a checkpoint of ours, so that its removal loses nothing else.
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

/// Removes those whose process has ended, and returns their paths. A checkpoint that was being replaced moves back if
/// nothing lies at its place, and stays if its place has no complete checkpoint. What cannot be removed stays, too.
SHARDWISE_API std::vector<std::string> remove_dead_leftovers(Disk& disk, const std::string& root);

} // namespace shardwise::files
