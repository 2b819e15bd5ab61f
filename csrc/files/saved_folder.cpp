#include "files/saved_folder.h"

#include "files/in_quotes.h"

#include <c10/util/StringUtil.h>

namespace shardwise::files {
namespace {

constexpr size_t kMostOpenFiles = 64;

} // namespace

SavedFolder::SavedFolder(Disk& disk, const std::string& place) : disk_(disk), index_(read_folder_index(disk, place)) {}

TensorReader& SavedFolder::reader(const std::string& file) {
  const auto open = readers_.find(file);
  if (open != readers_.end()) return open->second;
  if (readers_.size() == kMostOpenFiles) readers_.clear();
  return readers_.emplace(file, TensorReader(disk_, index_.path + "/" + file, index_.files.at(file))).first->second;
}

const SavedTensor& SavedFolder::tensor(const std::string& name) const {
  const auto found = index_.tensors.find(name);
  if (found != index_.tensors.end()) return found->second;
  const auto unknown = index_.unknown.find(name);
  if (unknown == index_.unknown.end()) {
    throw ValueError(c10::str(
        "shardwise: the checkpoint ", index_.path, " has no tensor ", in_quotes(name), ". Check the model's names."));
  }
  throw Error(c10::str(
      "shardwise: ", in_quotes(name), " of the checkpoint ", index_.path, " cannot be read: torch has no dtype ",
      in_quotes(unknown->second), ". Convert it with the program that wrote it; other tensors can be read."));
}

void SavedFolder::read(const std::string& name, const Box& box, std::span<std::byte> memory) {
  const auto& saved = tensor(name);
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(saved.dtype));
  if (!Box::whole(saved.sizes).holds(box) || box.numel() * item_bytes != static_cast<int64_t>(memory.size())) {
    throw ValueError(c10::str(
        "shardwise: ", in_quotes(name), " cannot be read from ", index_.path, " as ", text_of(box), " into ",
        memory.size(), " bytes: its sizes are ", text_of(saved.sizes), " in ", c10::toString(saved.dtype), "."));
  }
  try {
    read_chunks(name, box, memory);
  } catch (const Error&) {
    check_not_replaced(disk_, index_);
    throw;
  }
}

void SavedFolder::read_chunks(const std::string& name, const Box& box, std::span<std::byte> memory) {
  const auto& saved = tensor(name);
  const auto item_bytes = static_cast<int64_t>(c10::elementSize(saved.dtype));
  for (const auto& chunk : saved.chunks) {
    const auto piece = intersection(chunk.box, box);
    if (!piece) continue;
    auto& file = reader(chunk.file);
    for_each_run(*piece, chunk.box, box, item_bytes, [&](const Run& run) {
      const auto place = memory.subspan(static_cast<size_t>(run.to), static_cast<size_t>(run.bytes));
      file.read(chunk.begin + run.from, place, name);
    });
  }
}

std::vector<std::string> verify_checkpoint(Disk& disk, const std::string& place) {
  const auto index = read_folder_index(disk, place);
  if (!index.marker) {
    throw ValueError(c10::str(
        "shardwise: the checkpoint ", index.path,
        " cannot be verified: shardwise did not write it, so there are no "
        "checksums."));
  }
  std::vector<std::string> problems;
  std::vector<std::byte> memory(static_cast<size_t>(kBlockBytes));
  for (const auto& [name, record] : index.files) {
    try {
      TensorReader reader(disk, index.path + "/" + name, record);
      for (const auto& entry : reader.header().tensors) {
        for (auto at = entry.begin; at < entry.end; at += kBlockBytes) {
          const auto bytes = std::min(kBlockBytes, entry.end - at);
          reader.read(at, std::span(memory).first(static_cast<size_t>(bytes)), entry.name);
        }
      }
    } catch (const Error& error) {
      check_not_replaced(disk, index);
      problems.emplace_back(error.what());
    }
  }
  return problems;
}

} // namespace shardwise::files
