#include "files/saving.h"

#include "files/names.h"
#include "files/place.h"

#include <c10/util/StringUtil.h>

#include <cerrno>
#include <map>

namespace shardwise::files {
namespace {

/// Makes a folder and those above it, each so that it will survive a loss of power.
void make_folders(Disk& disk, const std::string& path) {
  if (disk.kind(path)) return;
  make_folders(disk, folder_of(path));
  try {
    disk.make_folder(path);
  } catch (const DiskError& error) {
    // Another process was quicker; or a link leads nowhere.
    if (error.number() != EEXIST || disk.kind(path) != Disk::Kind::folder) throw;
  }
  disk.sync_folder(folder_of(path));
}

// Under another name first: a marker that can be read is whole.
void write_marker(Disk& disk, const std::string& folder, const Marker& marker) {
  const auto text = marker_text(marker);
  const auto path = folder + "/" + kNewMarkerName;
  write_file(disk, path, text);
  disk.rename(path, folder + "/" + kMarkerName);
}

/// Moves the folder to its place. Returns where what was there is now; "" if nothing was.
std::string put_in_place(Disk& disk, const Saving& saving) {
  if (!disk.kind(saving.place)) {
    try {
      disk.rename(saving.folder, saving.place);
      return "";
    } catch (const DiskError& error) {
      // Another save was quicker: it is replaced.
      if (error.number() != ENOTEMPTY && error.number() != EEXIST) throw;
    }
  }
  if (disk.exchange(saving.folder, saving.place)) return saving.folder;
  auto replaced = temporary_path(saving.place, TemporaryKind::replaced, saving.owner);
  disk.rename(saving.place, replaced);
  disk.rename(saving.folder, saving.place);
  return replaced;
}

void remove_if_possible(Disk& disk, const std::string& folder) {
  try {
    remove_temporary_folder(disk, folder);
  } catch (const DiskError&) {
    return; // What cannot be removed is a leftover.
  }
}

// After an error of the disk it may be unknown whether the folders have changed places. What is in ours then is the
// checkpoint before, whose marker names another save.
bool is_of_this_save(Disk& disk, const Saving& saving) {
  try {
    const auto marker = read_marker(disk, saving.folder);
    return !marker || marker->save == saving.owner.text();
  } catch (const Error&) {
    return false;
  }
}

void clear_leftovers(Disk& disk, const std::string& root) {
  try {
    remove_dead_leftovers(disk, root);
  } catch (const DiskError&) {
    return; // What cannot be listed is in nobody's way.
  }
}

} // namespace

std::string make_temporary_folder(Disk& disk, const std::string& place, const Owner& owner) {
  const auto root = folder_of(place);
  make_folders(disk, root);
  clear_leftovers(disk, root);
  auto folder = temporary_path(place, TemporaryKind::saving, owner);
  disk.make_folder(folder);
  return folder;
}

Saving begin_saving(Disk& disk, const std::string& place) {
  const auto name = name_of(place);
  if (!is_plain_name(name) || parse_temporary_name(name))
    throw ValueError(c10::str("shardwise: a checkpoint cannot be saved to '", place, "'. Name another folder."));
  check_replaceable(disk, place);
  const auto owner = Owner::next();
  return {.place = without_slashes(place), .folder = make_temporary_folder(disk, place, owner), .owner = owner};
}

std::vector<FileRecord> write_shard(
    Disk& disk, const std::string& folder, int64_t shard, const std::vector<TensorToWrite>& tensors) {
  std::vector<std::vector<TensorToWrite>> by_file;
  std::map<std::string_view, size_t> pieces;
  for (const auto& tensor : tensors) {
    const auto file = pieces[tensor.name]++;
    if (file == by_file.size()) by_file.emplace_back();
    by_file[file].push_back(tensor);
  }
  std::vector<FileRecord> records;
  const auto files = static_cast<int64_t>(by_file.size());
  for (int64_t file = 0; file < files; ++file) {
    const auto path = c10::str(folder, "/", tensor_file_name(shard, file + 1, files));
    records.push_back(write_tensor_file(disk, path, by_file[static_cast<size_t>(file)]));
  }
  return records;
}

void commit_saving(Disk& disk, const Saving& saving, Marker marker) {
  marker.save = saving.owner.text();
  const auto problem = files_error(disk, saving.folder, marker);
  if (!problem.empty()) {
    throw Error(c10::str(
        "shardwise: the checkpoint ", saving.place, " cannot be completed: ", problem,
        ". All ranks must write to one folder that each of them can reach. The checkpoint before is unchanged."));
  }
  check_replaceable(disk, saving.place);
  disk.sync_folder(saving.folder);
  write_marker(disk, saving.folder, marker);
  disk.sync_folder(saving.folder);
  const auto before = put_in_place(disk, saving);
  disk.sync_folder(folder_of(saving.place));
  if (!before.empty()) remove_if_possible(disk, before);
}

void abandon_saving(Disk& disk, const Saving& saving) {
  if (is_of_this_save(disk, saving)) remove_if_possible(disk, saving.folder);
}

} // namespace shardwise::files
