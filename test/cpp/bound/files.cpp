// Files of checkpoints for Python, for test/python/interop/test_checkpoint_files.py.
#include "bound/parts.h"
#include "files/saved_folder.h"
#include "files/saving.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace shardwise::files {
namespace {

/// A piece of a tensor: its name, its values, and where it lies in the whole.
using Piece = std::tuple<std::string, at::Tensor, Sizes>;

void save(const std::string& place, const std::vector<std::vector<Piece>>& shards) {
  auto& disk = Disk::real();
  const auto saving = begin_saving(disk, place);
  Marker marker;
  marker.world = static_cast<int64_t>(shards.size());
  for (size_t rank = 0; rank < shards.size(); ++rank) {
    std::vector<TensorToWrite> tensors;
    for (const auto& [name, tensor, offsets] : shards[rank]) {
      const Bytes bytes(static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes());
      tensors.push_back(
          {.name = name,
           .dtype = tensor.scalar_type(),
           .box = {.offsets = offsets, .sizes = tensor.sizes().vec()},
           .data = {bytes}});
    }
    for (auto& record : write_shard(disk, saving.folder, static_cast<int64_t>(rank) + 1, tensors))
      marker.files.push_back(std::move(record));
  }
  commit_saving(disk, saving, std::move(marker));
}

at::Tensor read_piece(SavedFolder& folder, const std::string& name, const Box& box) {
  auto tensor = at::empty(box.sizes, folder.index().tensors.at(name).dtype);
  folder.read(name, box, {static_cast<std::byte*>(tensor.mutable_data_ptr()), tensor.nbytes()});
  return tensor;
}

std::map<std::string, at::Tensor> load(const std::string& place) {
  SavedFolder folder(Disk::real(), place);
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, tensor] : folder.index().tensors)
    result[name] = read_piece(folder, name, Box::whole(tensor.sizes));
  return result;
}

} // namespace
} // namespace shardwise::files

void bind_files(pybind11::module_& module) {
  using namespace shardwise::files;
  module.def("save", &save, "Saves a checkpoint as ranks with these pieces would: name, contiguous tensor, offsets.");
  module.def("load", &load, "All tensors of a folder, whole.");
  module.def(
      "load_piece",
      [](const std::string& place, const std::string& name, const Sizes& offsets, const Sizes& sizes) {
        SavedFolder folder(Disk::real(), place);
        return read_piece(folder, name, {.offsets = offsets, .sizes = sizes});
      },
      "A piece of one tensor.");
  module.def(
      "chunks",
      [](const std::string& place) {
        std::map<std::string, size_t> counts;
        const auto index = read_folder_index(Disk::real(), place);
        for (const auto& [name, tensor] : index.tensors) counts[name] = tensor.chunks.size();
        return counts;
      },
      "How many pieces a folder has of each tensor.");
}
