#pragma once

#include "files/disk.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::files {

/// A checkpoint in a folder of checkpoints: ROOT/step-10.
struct SavedStep {
  int64_t step = 0;
  /// Where it is: at its place, unless a save that was about to replace it died.
  std::string path;
};

SHARDWISE_API std::string step_path(const std::string& root, int64_t step);

/// The complete checkpoints, the newest last. A folder without a marker, or without all its files, is none.
SHARDWISE_API std::vector<SavedStep> complete_steps(Disk& disk, const std::string& root);
/// The complete checkpoint of the highest step.
SHARDWISE_API std::optional<SavedStep> newest_step(Disk& disk, const std::string& root);

/// Removes complete checkpoints until the `count` newest are left, once these will survive a loss of power, and returns
/// the paths of those that it removed. One in which somebody put other files stays.
/// Raises ValueError for a count below 1.
SHARDWISE_API std::vector<std::string> keep_newest_steps(Disk& disk, const std::string& root, int64_t count);

} // namespace shardwise::files
