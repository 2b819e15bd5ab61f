#include "files/merge.h"

#include "files/folder_index.h"
#include "files/json.h"
#include "files/names.h"
#include "files/place.h"
#include "files/saved_folder.h"
#include "files/saving.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace shardwise::files {
namespace {

struct Part {
  std::vector<std::string> names;
  int64_t bytes = 0;
};

int64_t bytes_of(const SavedTensor& tensor) {
  return Box::whole(tensor.sizes).numel() * static_cast<int64_t>(c10::elementSize(tensor.dtype));
}

/// Which tensors go to which file, in the order of their names.
std::vector<Part> parts_of(const FolderIndex& index, const std::vector<std::string>& without, int64_t most_bytes) {
  std::vector<Part> parts(1);
  for (const auto& [name, tensor] : index.tensors) {
    const auto begins_name = [&](const std::string& word) { return name.starts_with(word); };
    if (std::any_of(without.begin(), without.end(), begins_name)) continue;
    const auto bytes = bytes_of(tensor);
    if (!parts.back().names.empty() && parts.back().bytes + bytes > most_bytes) parts.emplace_back();
    parts.back().names.push_back(name);
    parts.back().bytes += bytes;
  }
  return parts;
}

void write_part(Disk& disk, SavedFolder& from, const Part& part, const std::string& path) {
  std::vector<std::unique_ptr<std::byte[]>> memory;
  std::vector<TensorToWrite> tensors;
  for (const auto& name : part.names) {
    const auto& saved = from.index().tensors.at(name);
    const auto bytes = static_cast<size_t>(bytes_of(saved));
    const auto whole = Box::whole(saved.sizes);
    auto& values = memory.emplace_back(std::make_unique_for_overwrite<std::byte[]>(bytes));
    if (bytes > 0) from.read(name, whole, {values.get(), bytes});
    tensors.push_back({.name = name, .dtype = saved.dtype, .box = whole, .data = {Bytes(values.get(), bytes)}});
  }
  write_tensor_file(disk, path, tensors, FileKind::whole);
}

void check_free(Disk& disk, const std::string& to) {
  const auto kind = disk.kind(to);
  const bool is_link = disk.is_link(to);
  if (!kind && !is_link) return;
  if (kind == Disk::Kind::folder && !is_link && disk.list(to).empty()) return;
  throw ValueError(c10::str("shardwise: ", to, " exists already. Name a new folder for the merged checkpoint."));
}

} // namespace

std::vector<std::string> merge_checkpoint(
    Disk& disk, const std::string& from, const std::string& to, const std::vector<std::string>& without,
    int64_t most_bytes) {
  check_free(disk, to);
  SavedFolder folder(disk, from);
  const auto parts = parts_of(folder.index(), without, most_bytes);
  // Before anything is written.
  for (const auto& [name, dtype] : folder.index().unknown) folder.tensor(name);
  const auto temporary = make_temporary_folder(disk, to, Owner::next());
  std::vector<std::string> written;
  try {
    Json::Object places;
    int64_t bytes = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      written.push_back(whole_file_name(static_cast<int64_t>(i) + 1, static_cast<int64_t>(parts.size())));
      write_part(disk, folder, parts[i], temporary + "/" + written.back());
      for (const auto& name : parts[i].names) places.push_back({name, written.back()});
      bytes += parts[i].bytes;
    }
    if (parts.size() > 1) {
      written.emplace_back(kHuggingFaceIndex);
      const Json::Object index{{"metadata", Json::Object{{"total_size", bytes}}}, {kWeightMap, std::move(places)}};
      write_file(disk, temporary + "/" + written.back(), json_text(index));
    }
    disk.sync_folder(temporary);
    disk.rename(temporary, to);
  } catch (...) {
    if (disk.kind(temporary)) remove_temporary_folder(disk, temporary);
    throw;
  }
  disk.sync_folder(folder_of(to));
  return written;
}

void check_file_place(Disk& disk, const std::string& file) {
  const bool is_link = disk.is_link(file);
  const auto kind = disk.kind(file);
  if (is_plain_name(name_of(file)) && !is_link && (!kind || kind == Disk::Kind::file)) return;
  throw ValueError(c10::str(
      "shardwise: tensors cannot be written to '", file, "', which is ",
      is_link                      ? "a link"
      : kind == Disk::Kind::folder ? "a folder"
                                   : "not a regular file",
      ". Name a file, such as FOLDER/model.safetensors."));
}

void write_whole_file(Disk& disk, const std::string& file, const std::vector<TensorToWrite>& tensors) {
  check_file_place(disk, file);
  const auto temporary = make_temporary_folder(disk, file, Owner::next());
  const auto path = temporary + "/" + whole_file_name(1, 1);
  try {
    write_tensor_file(disk, path, tensors, FileKind::whole);
    disk.rename(path, file);
  } catch (...) {
    remove_temporary_folder(disk, temporary);
    throw;
  }
  remove_temporary_folder(disk, temporary);
  disk.sync_folder(folder_of(file));
}

} // namespace shardwise::files
