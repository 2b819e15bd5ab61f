#pragma once

#include "files/place.h"

#include <string>
#include <vector>

namespace shardwise::files {

/// A folder beside checkpoints that a save or a removal left behind, or is still at work on.
struct Leftover {
  std::string path;
  NameAside name;
  /// Whether its process has surely ended.
  bool is_dead = false;
};

/// The leftovers in a folder of checkpoints.
SHARDWISE_API std::vector<Leftover> leftovers(Disk& disk, const std::string& root);

/// Removes those that are dead, and returns their paths. One that was being replaced is put back where nothing is at
/// its place, and stays where its place has no complete checkpoint. What cannot be removed stays, too.
SHARDWISE_API std::vector<std::string> remove_dead_leftovers(Disk& disk, const std::string& root);

} // namespace shardwise::files
