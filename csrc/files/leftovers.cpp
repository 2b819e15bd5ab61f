#include "files/leftovers.h"

#include <c10/util/StringUtil.h>

namespace shardwise::files {
namespace {

/// Whether it is gone. One that was being replaced may be all that there is.
bool remove_leftover(Disk& disk, const std::string& root, const Leftover& leftover) {
  const auto place = c10::str(root, "/", leftover.name.place);
  if (leftover.name.aside == Aside::replaced) {
    if (!disk.kind(place) && is_complete(disk, leftover.path)) disk.rename(leftover.path, place);
    if (!disk.kind(leftover.path) || !is_complete(disk, place)) return false;
  }
  // The process may have died before it made sure that what took its place will survive a loss of power.
  disk.sync_folder(root);
  remove_folder_aside(disk, leftover.path);
  return true;
}

} // namespace

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
    try {
      if (leftover.is_dead && remove_leftover(disk, root, leftover)) removed.push_back(leftover.path);
    } catch (const DiskError&) {
      continue; // It stays; another process may be removing it.
    }
  }
  return removed;
}

} // namespace shardwise::files
