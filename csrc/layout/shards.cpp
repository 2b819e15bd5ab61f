#include "layout/shards.h"

#include <shardwise/error.h>

#include <c10/util/accumulate.h>

#include <algorithm>
#include <string>

namespace shardwise::layout {
namespace {

using std::to_string;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

} // namespace

int64_t alignment(int64_t bytes_of_element) {
  return std::max<int64_t>(1, 128 / bytes_of_element);
}

int64_t with_counts(const Shards& shards, size_t counts, int64_t alignment) {
  return round_up(shards.part + static_cast<int64_t>(counts), alignment);
}

std::vector<int64_t> Cut::piece_sizes(int64_t rank) const {
  auto sizes = shape;
  sizes[dim] = length(rank);
  return sizes;
}

int64_t Cut::piece_numel(int64_t rank) const {
  return c10::multiply_integers(piece_sizes(rank));
}

Shards rows(
    const std::vector<std::vector<int64_t>>& shapes, const std::vector<int64_t>& dims, int64_t world,
    int64_t alignment) {
  Shards result;
  result.world = world;
  for (size_t i = 0; i < shapes.size(); ++i) {
    Cut cut;
    cut.shape = shapes[i];
    // A scalar has no dimension to cut, so it counts as one row.
    if (cut.shape.empty()) cut.shape = {1};
    cut.dim = dims[i];
    const auto ndim = static_cast<int64_t>(cut.shape.size());
    if (cut.dim < 0 || cut.dim >= ndim) {
      throw ValueError(
          "shardwise: a tensor of " + to_string(ndim) + " dimensions cannot be cut along dimension " +
          to_string(cut.dim) + ".");
    }
    const auto size = cut.shape[cut.dim];
    const auto chunk = (size + world - 1) / world;
    for (int64_t rank = 0; rank <= world; ++rank) cut.starts.push_back(std::min(rank * chunk, size));
    cut.offsets.assign(world, result.part);
    result.part += round_up(cut.piece_numel(0), alignment);
    result.cuts.push_back(std::move(cut));
  }
  return result;
}

Shards flat(const std::vector<std::vector<int64_t>>& shapes, int64_t world, int64_t alignment) {
  int64_t total = 0;
  std::vector<int64_t> begins;
  for (const auto& shape : shapes) {
    begins.push_back(total);
    total += round_up(c10::multiply_integers(shape), alignment);
  }
  Shards result;
  result.world = world;
  result.part = round_up((total + world - 1) / world, alignment);
  for (size_t i = 0; i < shapes.size(); ++i) {
    Cut cut;
    const auto numel = c10::multiply_integers(shapes[i]);
    cut.shape = {numel};
    for (int64_t rank = 0; rank <= world; ++rank) {
      const auto edge = rank * result.part;
      cut.starts.push_back(std::clamp<int64_t>(edge - begins[i], 0, numel));
      if (rank < world) cut.offsets.push_back(std::clamp<int64_t>(begins[i] - edge, 0, result.part));
    }
    result.cuts.push_back(std::move(cut));
  }
  return result;
}

Shards some_of(const Shards& shards, const std::vector<size_t>& chosen, int64_t alignment) {
  Shards result;
  result.world = shards.world;
  for (const auto index : chosen) result.cuts.push_back(shards.cuts[index]);
  for (int64_t rank = 0; rank < result.world; ++rank) {
    int64_t end = 0;
    for (auto& cut : result.cuts) {
      cut.offsets[rank] = end;
      end += round_up(cut.piece_numel(rank), alignment);
    }
    result.part = std::max(result.part, end);
  }
  return result;
}

} // namespace shardwise::layout
