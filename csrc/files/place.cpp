#include "files/place.h"

#include "files/in_quotes.h"
#include "files/names.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace shardwise::files {
namespace {

constexpr std::array kTemporaryWords = {
    std::pair{TemporaryKind::saving, ".saving-"},
    std::pair{TemporaryKind::replaced, ".replaced-"},
    std::pair{TemporaryKind::removing, ".removing-"},
};

/// Whether a checkpoint of ours has files of such names.
bool is_own_file(const std::string& name) {
  return is_tensor_file(name) || name == kMarkerName || name == kNewMarkerName;
}

/// More tries than ranks add files while a folder is removed. A limit is needed, since a file system may hide files.
constexpr int kMostRounds = 1000;

// Another process may remove the same folder.
void remove_file_if_there(Disk& disk, const std::string& path) {
  try {
    disk.remove_file(path);
  } catch (const DiskError& error) {
    if (error.number() != ENOENT) throw;
  }
}

/// What is not of a checkpoint of ours; "" if all is.
std::string first_of_others(Disk& disk, const std::string& folder) {
  const auto names = disk.list(folder);
  for (const auto& name : names) {
    if (!is_own_file(name)) return name;
  }
  const bool has_marker = std::find(names.begin(), names.end(), kMarkerName) != names.end();
  return names.empty() || has_marker ? "" : names.front();
}

/// Whether it is gone. One that was being replaced may be all that there is.
bool remove_leftover(Disk& disk, const std::string& root, const Leftover& leftover) {
  const auto place = c10::str(root, "/", leftover.name.place);
  if (leftover.name.kind == TemporaryKind::replaced) {
    if (!disk.kind(place) && is_complete(disk, leftover.path)) disk.rename(leftover.path, place);
    if (!disk.kind(leftover.path) || !is_complete(disk, place)) return false;
  }
  // The process may have died before it made sure that what took its place will survive a loss of power.
  disk.sync_folder(root);
  remove_temporary_folder(disk, leftover.path);
  return true;
}

} // namespace

std::string temporary_path(const std::string& place, TemporaryKind kind, const Owner& owner) {
  const auto folder = folder_of(place);
  return c10::str(folder, "/", name_of(place), kTemporaryWords.at(static_cast<size_t>(kind)).second, owner.text());
}

std::optional<TemporaryName> parse_temporary_name(std::string_view name) {
  for (const auto& [kind, word] : kTemporaryWords) {
    const auto at = name.rfind(word);
    if (at == std::string_view::npos || at == 0) continue;
    const auto owner = Owner::parse(name.substr(at + std::string_view(word).size()));
    if (owner) return TemporaryName{.place = std::string(name.substr(0, at)), .kind = kind, .owner = *owner};
  }
  return {};
}

bool is_complete(Disk& disk, const std::string& folder) {
  try {
    const auto marker = read_marker(disk, folder);
    return marker && files_error(disk, folder, *marker).empty();
  } catch (const DiskError& error) {
    // It may have been removed meanwhile.
    if (error.number() != ENOENT && error.number() != ENOTDIR) throw;
    return false;
  } catch (const Error&) {
    return false;
  }
}

std::string find_checkpoint(Disk& disk, const std::string& place) {
  const auto folder = folder_of(place);
  if (disk.kind(place) == Disk::Kind::folder) return place;
  std::vector<std::string> found;
  const bool has_folder = !disk.kind(place) && disk.kind(folder) == Disk::Kind::folder;
  for (const auto& each : has_folder ? leftovers(disk, folder) : std::vector<Leftover>()) {
    const bool is_of_place = each.name.place == name_of(place) && each.name.kind == TemporaryKind::replaced;
    if (is_of_place && is_complete(disk, each.path)) found.push_back(each.path);
  }
  if (found.size() == 1) return found[0];
  if (found.empty())
    throw Error(c10::str("shardwise: there is no checkpoint ", place, ": no such folder. Check the path."));
  throw Error(c10::str(
      "shardwise: the checkpoint ", place, " was being replaced more than once when the processes died: ",
      c10::Join(" and ", found), " are complete. Rename the one that you want to ", place, "."));
}

void check_replaceable(Disk& disk, const std::string& place) {
  // Also one that leads nowhere.
  const bool is_link = disk.is_link(place);
  const auto kind = disk.kind(place);
  if (!kind && !is_link) return;
  if (is_link || *kind != Disk::Kind::folder) {
    throw ValueError(c10::str(
        "shardwise: a checkpoint cannot be saved to ", place, ", which is a ", is_link ? "link" : "file",
        ". Name another place."));
  }
  const auto other = first_of_others(disk, place);
  if (other.empty()) return;
  throw ValueError(c10::str(
      "shardwise: a checkpoint cannot be saved to ", place, ": what is there would be lost, and ", in_quotes(other),
      " is not of a checkpoint of shardwise's. Save to another place, or move it away."));
}

bool is_ours(Disk& disk, const std::string& folder) {
  return first_of_others(disk, folder).empty();
}

void remove_temporary_folder(Disk& disk, const std::string& folder) {
  // A rank that still writes may add a file at any time but after the last step. Other files are not ours to remove.
  for (int round = 0;; ++round) {
    auto names = disk.list(folder);
    const bool is_empty = names.empty();
    std::erase_if(names, [](const auto& name) { return !is_own_file(name) && name != kHuggingFaceIndex; });
    if (names.empty()) {
      try {
        return disk.remove_folder(folder);
      } catch (const DiskError& error) {
        if (!is_empty || error.number() != ENOTEMPTY || round == kMostRounds) throw;
      }
    }
    // From the first step on it is no checkpoint any more.
    std::stable_partition(names.begin(), names.end(), [](const auto& name) { return name == kMarkerName; });
    for (const auto& name : names) remove_file_if_there(disk, c10::str(folder, "/", name));
  }
}

std::vector<Leftover> leftovers(Disk& disk, const std::string& root) {
  std::vector<Leftover> result;
  for (const auto& name : disk.list(root)) {
    auto temporary = parse_temporary_name(name);
    if (!temporary) continue;
    const bool is_dead = temporary->owner.has_ended();
    result.push_back({.path = c10::str(root, "/", name), .name = std::move(*temporary), .is_dead = is_dead});
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
