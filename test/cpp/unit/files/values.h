#pragma once

#include "files/saved_folder.h"
#include "files/saving.h"

#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::test {

inline std::string random_bytes(size_t count, std::mt19937& random) {
  std::string bytes(count, '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

/// The same ones for one count.
inline std::string some_bytes(size_t count) {
  std::mt19937 random(static_cast<uint32_t>(count));
  return random_bytes(count, random);
}

/// What a checkpoint has in a box of a tensor, or in all of it. Raises what reading raises.
inline std::string bytes_of(
    files::SavedFolder& folder, const std::string& name, const std::optional<files::Box>& box = {}) {
  const auto& saved = folder.tensor(name);
  const auto wanted = box.value_or(files::Box::whole(saved.sizes));
  std::string bytes(static_cast<size_t>(wanted.numel()) * c10::elementSize(saved.dtype), '\0');
  folder.read(name, wanted, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

/// Tensors with values of their own memory, to be saved by some ranks.
class Values {
 public:
  /// Adds a whole tensor of random bytes, which rows cut among `ranks` ranks.
  Values& add(
      const std::string& name, c10::ScalarType dtype, const files::Sizes& sizes, int64_t ranks, std::mt19937& random) {
    const auto item = static_cast<int64_t>(c10::elementSize(dtype));
    auto bytes = random_bytes(static_cast<size_t>(*files::product_of(sizes) * item), random);
    wholes_.push_back({name, dtype, sizes, std::move(bytes)});
    for (int64_t rank = 0; rank < ranks; ++rank) {
      if (static_cast<int64_t>(shards_.size()) == rank) shards_.emplace_back();
      auto box = files::Box::whole(sizes);
      if (!sizes.empty()) {
        const auto begin = sizes[0] * rank / ranks;
        box.offsets[0] = begin;
        box.sizes[0] = sizes[0] * (rank + 1) / ranks - begin;
      } else if (rank > 0) {
        continue;
      }
      shards_[static_cast<size_t>(rank)].push_back({wholes_.size() - 1, std::move(box)});
    }
    return *this;
  }

  int64_t ranks() const {
    return static_cast<int64_t>(shards_.size());
  }

  std::vector<files::TensorToWrite> shard(int64_t rank) const {
    std::vector<files::TensorToWrite> result;
    for (const auto& [index, box] : shards_[static_cast<size_t>(rank)]) {
      const auto& whole = wholes_[index];
      const auto all = std::as_bytes(std::span(whole.bytes));
      const auto row = box.sizes.empty() || whole.sizes[0] == 0 ? all.size() : all.size() / whole.sizes[0];
      const auto data = box.sizes.empty() ? all : all.subspan(box.offsets[0] * row, box.sizes[0] * row);
      result.push_back({.name = whole.name, .dtype = whole.dtype, .box = box, .data = {data}});
    }
    return result;
  }

  /// Saves all of them as all ranks would.
  void save(files::Disk& disk, const std::string& place, files::Json::Object own = {}) const {
    const auto saving = files::begin_saving(disk, place);
    try {
      files::Marker marker;
      marker.world = ranks();
      marker.values = std::move(own);
      for (int64_t rank = 0; rank < ranks(); ++rank) {
        for (auto& record : files::write_shard(disk, saving.folder, rank + 1, shard(rank)))
          marker.files.push_back(std::move(record));
      }
      files::commit_saving(disk, saving, std::move(marker));
    } catch (const Error&) {
      files::abandon_saving(disk, saving);
      throw;
    }
  }

  /// Whether a checkpoint has just these tensors with these values. Raises what reading raises.
  bool are_in(files::Disk& disk, const std::string& place) const {
    files::SavedFolder folder(disk, place);
    if (folder.index().tensors.size() != wholes_.size()) return false;
    for (const auto& whole : wholes_) {
      const auto found = folder.index().tensors.find(whole.name);
      if (found == folder.index().tensors.end()) return false;
      if (found->second.dtype != whole.dtype || found->second.sizes != whole.sizes) return false;
      if (bytes_of(folder, whole.name) != whole.bytes) return false;
    }
    return true;
  }

 private:
  struct Whole {
    std::string name;
    c10::ScalarType dtype;
    files::Sizes sizes;
    std::string bytes;
  };

  std::vector<Whole> wholes_;
  std::vector<std::vector<std::pair<size_t, files::Box>>> shards_;
};

/// A few tensors of two ranks; another seed has other values.
inline Values some_values(uint32_t seed) {
  std::mt19937 random(seed);
  Values values;
  values.add("layer.weight", c10::ScalarType::Float, {5, 3}, 2, random)
      .add("layer.bias", c10::ScalarType::BFloat16, {7}, 2, random)
      .add("step", c10::ScalarType::Long, {}, 2, random);
  return values;
}

} // namespace shardwise::test
