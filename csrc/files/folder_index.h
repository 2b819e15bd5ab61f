#pragma once

#include "files/box.h"
#include "files/disk.h"
#include "files/json.h"
#include "files/marker.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::files {

/// A piece of a tensor in a file.
struct Chunk {
  /// Its name in the folder.
  std::string file;
  Box box;
  /// The range of its bytes in the file's data.
  int64_t begin = 0;
  int64_t end = 0;
  /// How far apart neighbours along each dimension are, in elements, where they are not row-major.
  Sizes strides = {};
};

/// A tensor of a checkpoint, whose chunks hold each of its elements once.
struct SavedTensor {
  c10::ScalarType dtype = c10::ScalarType::Float;
  Sizes sizes;
  std::vector<Chunk> chunks;
};

/// The contents of a folder of safetensors files, or of one file.
struct FolderIndex {
  /// The path that the caller gave, and the path of the folder that was found.
  std::string place;
  std::string path;
  /// The folder of the files: the path, or that of the one file there.
  std::string folder;
  /// Whether the files are of Python's torch.save(): of such a file all is data.
  bool of_torch_save = false;
  /// Nothing for a checkpoint that shardwise did not write.
  std::optional<Marker> marker;
  /// The program's own values, by name.
  Json::Object values;
  /// The files by name, with records where there is a marker.
  std::map<std::string, std::optional<FileRecord>> files;
  std::map<std::string, SavedTensor> tensors;
  /// Tensors that cannot be read, with their dtypes, which torch does not have.
  std::map<std::string, std::string> unknown;
};

/// Reads what a folder has, of its files only their headers. It may be a checkpoint of ours, also one that was about to
/// be replaced; one of torch's HuggingFaceStorageWriter, sharded or whole; or one of Hugging Face's libraries, of
/// safetensors or of torch.save(), with an index or without. Instead of a folder it may be one file: of safetensors, or
/// of Python's torch.save(), of which `entry` may be the one that is loaded. Raises Error, with the names of file and
/// tensor, for a folder that is missing, unfinished or broken, for one of ours without its marker, for files outside
/// the folder, and for tensors whose chunks do not have each element once. Raises ValueError for an entry of anything
/// but a file of torch.save().
SHARDWISE_API FolderIndex read_folder_index(Disk& disk, const std::string& place, const std::string& entry = "");

/// Call this after an error: raises Error if another save has replaced the checkpoint, and so its files, meanwhile.
SHARDWISE_API void check_not_replaced(Disk& disk, const FolderIndex& index);

} // namespace shardwise::files
