#include "files/steps.h"

#include <shardwise/save.h>

namespace shardwise {

std::string step_folder(const std::string& root, int64_t step) {
  return files::step_path(root, step);
}

std::optional<SavedStep> newest_step(const std::string& root) {
  const auto newest = files::newest_step(files::Disk::real(), root);
  return newest ? std::optional(SavedStep{newest->step, newest->path}) : std::nullopt;
}

std::vector<std::string> keep_newest_steps(const std::string& root, int64_t count) {
  return files::keep_newest_steps(files::Disk::real(), root, count);
}

} // namespace shardwise
