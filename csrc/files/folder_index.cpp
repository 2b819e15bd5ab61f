#include "files/folder_index.h"

#include "files/in_quotes.h"
#include "files/names.h"
#include "files/place.h"
#include "files/tensor_header.h"
#include "files/tensor_reader.h"
#include "files/torch_file.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace shardwise::files {
namespace {

/// That of a million tensors is shorter.
constexpr int64_t kLongestIndex = 100'000'000;

/// Reads an index of Hugging Face's: the file of each tensor, by the tensor's name. The files' names end in `end`.
/// Raises Error if it is not what their libraries write, and for a file that does not lie in the folder.
std::map<std::string, std::string> read_hugging_face_index(
    Disk& disk, const std::string& path, const std::string& end) {
  const auto json = parse_json(read_text(disk, path, kLongestIndex), path);
  const auto* places = json.find(kWeightMap);
  const auto* members = places == nullptr ? nullptr : places->as<Json::Object>();
  if (members == nullptr)
    throw Error(c10::str("shardwise: ", path, " is broken: it has no object ", kWeightMap, ". ", kRemedy));
  std::map<std::string, std::string> result;
  for (const auto& [name, value] : *members) {
    const auto* file = value.as<std::string>();
    if (file == nullptr || !is_tensor_file(*file, end)) {
      throw Error(c10::str(
          "shardwise: ", path, " is broken: it says that ", in_quotes(name), " is in ",
          file == nullptr ? "something that is not a string" : in_quotes(*file),
          "; it must be in a file of this folder that ends in ", end, ". ", kRemedy));
    }
    result.emplace(name, *file);
  }
  return result;
}

class IndexReader {
 public:
  IndexReader(Disk& disk, const std::string& place, const std::string& entry) : disk_(disk), entry_(entry) {
    index_.place = place;
    is_one_file_ = disk.kind(place) == Disk::Kind::file;
    if (is_one_file_) {
      index_.path = place;
      index_.folder = folder_of(place);
      return;
    }
    index_.path = index_.folder = find_checkpoint(disk, place);
    index_.marker = read_marker(disk, index_.path);
    if (index_.marker) index_.values = index_.marker->values;
    if (!index_.marker && parse_temporary_name(name_of(index_.path))) {
      throw Error(c10::str(
          "shardwise: ", index_.path, " is not a checkpoint, but the rest of one that was never completed, or was ",
          "being removed. Load another one."));
    }
  }

  FolderIndex read() {
    try {
      read_files();
    } catch (const Error&) {
      check_not_replaced(disk_, index_);
      throw;
    }
    return std::move(index_);
  }

 private:
  void read_files() {
    find_files();
    if (!entry_.empty() && !index_.of_torch_save) {
      throw ValueError(c10::str(
          "shardwise: ", index_.path, " has no entries, such as ", in_quotes(entry_),
          ": only a file of torch.save() has. Load it without one."));
    }
    for (const auto& [file, record] : index_.files) {
      if (index_.of_torch_save) {
        add_torch_file(file);
      } else {
        add_file(file, record);
      }
    }
    for (const auto& [name, file] : places_) {
      if (!index_.tensors.contains(name) && !index_.unknown.contains(name))
        fail(c10::str("its index names ", in_quotes(name), ", which ", file, " does not have"));
    }
    if (index_.of_torch_save) return;
    for (auto& [name, tensor] : index_.tensors) finish(name, tensor);
  }

  void find_files() {
    if (is_one_file_) {
      index_.of_torch_save = is_torch_file(*disk_.open(index_.path), index_.path);
      index_.files.emplace(name_of(index_.path), std::nullopt);
    } else if (index_.marker) {
      const auto problem = files_error(disk_, index_.path, *index_.marker);
      if (!problem.empty()) fail(problem);
      for (const auto& file : index_.marker->files) index_.files.emplace(file.name, file);
    } else {
      find_foreign_files();
    }
  }

  /// Whether an index says that the tensor lies in another file than this one, or in none.
  bool lies_elsewhere(const std::string& name, const std::string& file) const {
    if (places_.empty()) return false;
    const auto place = places_.find(name);
    return place == places_.end() || place->second != file;
  }

  void add_torch_file(const std::string& file) {
    const auto path = index_.folder + "/" + file;
    auto read = read_torch_file(*disk_.open(path), path, entry_);
    if (is_one_file_) index_.values = std::move(read.values);
    for (auto& [name, tensor] : read.tensors) {
      if (!lies_elsewhere(name, file)) index_.tensors.emplace(name, std::move(tensor));
    }
  }

  [[noreturn]] void fail(const std::string& why) const {
    throw Error(c10::str("shardwise: the checkpoint ", index_.path, " is broken: ", why, ". ", kRemedy));
  }

  void find_foreign_files() {
    if (find_by_index(kHuggingFaceIndex, kTensorFileEnd)) return;
    for (const auto& name : disk_.list(index_.path)) {
      if (is_tensor_file(name)) index_.files.emplace(name, std::nullopt);
    }
    if (!index_.files.empty()) return;
    index_.of_torch_save = true;
    if (find_by_index(kTorchIndex, kTorchFileEnd)) return;
    if (!disk_.kind(index_.path + "/" + kTorchFile)) {
      throw Error(c10::str(
          "shardwise: the folder ", index_.path, " has no checkpoint: neither ", kMarkerName, " nor files that end in ",
          kTensorFileEnd, ", nor ", kTorchFile, ". Check the path."));
    }
    index_.files.emplace(kTorchFile, std::nullopt);
  }

  /// Whether the folder has an index of this name; then its files are those of the checkpoint.
  bool find_by_index(const char* name, const std::string& end) {
    const auto path = index_.path + "/" + name;
    if (!disk_.kind(path)) return false;
    places_ = read_hugging_face_index(disk_, path, end);
    for (const auto& [tensor, file] : places_) index_.files.emplace(file, std::nullopt);
    return true;
  }

  /// One of ours that lost its marker must not pass for one of others, of which nothing can be verified.
  void check_foreign(const TensorHeader& header) const {
    const bool is_ours = header.texts.contains(kWriter) ||
                         std::any_of(header.tensors.begin(), header.tensors.end(), [](const TensorEntry& entry) {
                           return entry.name.starts_with(kProgram) || entry.name.starts_with(kOptimizerState) ||
                                  entry.name.starts_with(kOptimizerOptions);
                         });
    if (is_ours && is_one_file_) {
      throw Error(c10::str(
          "shardwise: ", index_.path, " is one of the files of a checkpoint. Load the folder ", index_.folder, "."));
    }
    if (is_ours) {
      fail(c10::str(
          "shardwise saved it, but its ", kMarkerName, " is missing, without which nothing of it can be verified"));
    }
  }

  void add_file(const std::string& file, const std::optional<FileRecord>& record) {
    const TensorReader reader(disk_, index_.folder + "/" + file, record);
    if (!index_.marker) check_foreign(reader.header());
    for (const auto& entry : reader.header().tensors) {
      // With an index, what it does not name at this file is not of the checkpoint.
      if (lies_elsewhere(entry.name, file)) continue;
      if (!entry.unknown_dtype.empty()) {
        index_.unknown.emplace(entry.name, entry.unknown_dtype);
        continue;
      }
      auto& tensor = index_.tensors[entry.name];
      if (tensor.chunks.empty()) {
        tensor.dtype = entry.dtype;
        tensor.sizes = Sizes(entry.box.sizes.size(), 0);
      }
      const auto dims = entry.box.sizes.size();
      if (tensor.dtype != entry.dtype || tensor.sizes.size() != dims) {
        fail(c10::str(
            "its tensor ", in_quotes(entry.name), " has the dtype ", c10::toString(tensor.dtype), " and ",
            tensor.sizes.size(), " dimensions in ", tensor.chunks[0].file, ", but ", c10::toString(entry.dtype),
            " and ", dims, " in ", file));
      }
      for (size_t dim = 0; dim < dims; ++dim)
        tensor.sizes[dim] = std::max(tensor.sizes[dim], entry.box.offsets[dim] + entry.box.sizes[dim]);
      tensor.chunks.push_back({.file = file, .box = entry.box, .begin = entry.begin, .end = entry.end});
    }
  }

  void finish(const std::string& name, const SavedTensor& tensor) const {
    std::vector<Box> boxes;
    for (const auto& chunk : tensor.chunks) boxes.push_back(chunk.box);
    const auto problem = cover_error(tensor.sizes, boxes);
    if (!problem.empty()) fail(c10::str("of its tensor ", in_quotes(name), " ", problem));
  }

  Disk& disk_;
  const std::string& entry_;
  bool is_one_file_ = false;
  FolderIndex index_;
  /// The file of each tensor, where an index says it.
  std::map<std::string, std::string> places_;
};

} // namespace

FolderIndex read_folder_index(Disk& disk, const std::string& place, const std::string& entry) {
  return IndexReader(disk, place, entry).read();
}

void check_not_replaced(Disk& disk, const FolderIndex& index) {
  if (!index.marker) return;
  std::optional<Marker> now;
  try {
    now = read_marker(disk, find_checkpoint(disk, index.place));
  } catch (const Error&) {
    return; // The error that there was says more.
  }
  if (!now || now->save == index.marker->save) return;
  throw Error(c10::str(
      "shardwise: the checkpoint ", index.place,
      " was replaced by another save while it was being read. Load it again, or save each step to a folder of its "
      "own."));
}

} // namespace shardwise::files
