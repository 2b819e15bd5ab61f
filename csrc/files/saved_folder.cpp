#include "files/saved_folder.h"

#include "files/in_quotes.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>

namespace shardwise::files {
namespace {

constexpr size_t kMostOpenFiles = 64;

/// Reads a box of a chunk that is not row-major, in the order in which its elements lie in the file, so that each block
/// of the file is read once.
void read_strided(
    TensorReader& file, const Chunk& chunk, const Box& box, int64_t item_bytes, std::span<std::byte> memory,
    const std::string& name) {
  const auto dims = box.sizes.size();
  Sizes to(dims, item_bytes);
  for (auto dim = dims - 1; dim > 0; --dim) to[dim - 1] = to[dim] * box.sizes[dim];
  std::vector<size_t> order(dims);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(
      order.begin(), order.end(), [&](auto one, auto other) { return chunk.strides[one] > chunk.strides[other]; });
  const auto last = order.back();
  // Elements beside each other in the file are read at once.
  const bool has_runs = chunk.strides[last] == 1;
  std::vector<std::byte> run(static_cast<size_t>(item_bytes * (has_runs ? box.sizes[last] : 1)));
  Sizes index(dims, 0);
  while (true) {
    auto from = chunk.begin;
    int64_t place = 0;
    for (size_t dim = 0; dim < dims; ++dim) {
      from += (box.offsets[dim] + index[dim]) * chunk.strides[dim] * item_bytes;
      place += index[dim] * to[dim];
    }
    file.read(from, run, name);
    for (size_t at = 0; at < run.size(); at += static_cast<size_t>(item_bytes), place += to[last])
      std::copy_n(run.begin() + static_cast<std::ptrdiff_t>(at), item_bytes, memory.begin() + place);
    // The next one, the last dimensions first.
    size_t at = dims - (has_runs ? 1 : 0);
    while (at > 0 && ++index[order[at - 1]] == box.sizes[order[at - 1]]) index[order[--at]] = 0;
    if (at == 0) return;
  }
}

} // namespace

SavedFolder::SavedFolder(Disk& disk, const std::string& place, const std::string& entry)
    : disk_(disk),
      index_(read_folder_index(disk, place, entry)) {}

TensorReader& SavedFolder::reader(const std::string& file) {
  const auto open = readers_.find(file);
  if (open != readers_.end()) return open->second;
  if (readers_.size() == kMostOpenFiles) readers_.clear();
  const auto path = index_.folder + "/" + file;
  auto opened = index_.of_torch_save ? TensorReader(disk_, path) : TensorReader(disk_, path, index_.files.at(file));
  return readers_.emplace(file, std::move(opened)).first->second;
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
    for (const auto& chunk : saved.chunks) {
      const auto piece = intersection(chunk.box, box);
      if (!piece) continue;
      auto& file = reader(chunk.file);
      if (!chunk.strides.empty()) {
        read_strided(file, chunk, box, item_bytes, memory, name);
        continue;
      }
      for_each_run(*piece, chunk.box, box, item_bytes, [&](const Run& run) {
        const auto place = memory.subspan(static_cast<size_t>(run.to), static_cast<size_t>(run.bytes));
        file.read(chunk.begin + run.from, place, name);
      });
    }
  } catch (const Error&) {
    check_not_replaced(disk_, index_);
    throw;
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
      TensorReader reader(disk, index.folder + "/" + name, record);
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
