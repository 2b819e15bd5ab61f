#include "files/leftovers.h"

#include <c10/util/StringUtil.h>

namespace shardwise::files {

std::vector<Leftover> leftovers(Disk& disk, const std::string& root) {
  std::vector<Leftover> result;
  for (const auto& name : disk.list(root)) {
    auto aside = parse_name_aside(name);
    if (!aside) continue;
    const bool is_dead = aside->owner.has_ended();
    result.push_back({.path = c10::str(root, "/", name), .name = std::move(*aside), .is_dead = is_dead});
  }
  return result;
}

std::vector<std::string> remove_dead_leftovers(Disk& disk, const std::string& root) {
  std::vector<std::string> removed;
  for (const auto& leftover : leftovers(disk, root)) {
    if (!leftover.is_dead) continue;
    const auto place = c10::str(root, "/", leftover.name.place);
    if (leftover.name.aside == Aside::replaced) {
      if (!disk.kind(place) && is_complete(disk, leftover.path)) disk.rename(leftover.path, place);
      if (!disk.kind(leftover.path) || !is_complete(disk, place)) continue;
    }
    // The process may have died before it made sure that what took its place will survive a loss of power.
    disk.sync_folder(root);
    remove_folder_aside(disk, leftover.path);
    removed.push_back(leftover.path);
  }
  return removed;
}

} // namespace shardwise::files
