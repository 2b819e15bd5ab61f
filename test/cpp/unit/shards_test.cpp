#include "layout/shards.h"

#include <shardwise/error.h>

#include <c10/util/accumulate.h>
#include <catch2/catch.hpp>

#include <random>

using shardwise::layout::Cut;
using shardwise::layout::flat;
using shardwise::layout::rows;
using shardwise::layout::Shards;
using shardwise::layout::some_of;
using shardwise::layout::with_counts;

namespace {

using Shapes = std::vector<std::vector<int64_t>>;

/// The elements of a parameter, as row-major indices, that a rank holds, in the order of its piece.
std::vector<int64_t> piece(const Cut& cut, int64_t rank) {
  int64_t inner = 1;
  for (size_t i = cut.dim + 1; i < cut.shape.size(); ++i) inner *= cut.shape[i];
  int64_t outer = 1;
  for (int64_t i = 0; i < cut.dim; ++i) outer *= cut.shape[i];
  std::vector<int64_t> result;
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t k = cut.starts[rank]; k < cut.starts[rank + 1]; ++k) {
      for (int64_t i = 0; i < inner; ++i) result.push_back((o * cut.shape[cut.dim] + k) * inner + i);
    }
  }
  return result;
}

struct Case {
  Shapes shapes;
  std::vector<int64_t> dims;
  int64_t world;
  int64_t alignment;
};

Case random_case(std::mt19937& random) {
  const auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % bound); };
  Case result{.shapes = {}, .dims = {}, .world = 1 + below(64), .alignment = int64_t{1} << below(6)};
  result.shapes.resize(below(6));
  for (auto& shape : result.shapes) {
    shape.resize(1 + below(3));
    for (auto& size : shape) size = below(8) == 0 ? 0 : 1 + below(13);
    result.dims.push_back(below(static_cast<int64_t>(shape.size())));
  }
  return result;
}

/// Every element of every parameter is in exactly one rank's part, and no two elements are in one place.
void check_partition(const Shards& layout, const Shapes& shapes, int64_t world) {
  REQUIRE(layout.cuts.size() == shapes.size());
  std::vector<std::vector<int>> taken(world, std::vector<int>(layout.part));
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto& cut = layout.cuts[i];
    std::vector<int> owners(c10::multiply_integers(shapes[i]));
    for (int64_t rank = 0; rank < world; ++rank) {
      const auto elements = piece(cut, rank);
      REQUIRE(static_cast<int64_t>(elements.size()) == cut.piece_numel(rank));
      REQUIRE(c10::multiply_integers(cut.piece_sizes(rank)) == cut.piece_numel(rank));
      for (size_t k = 0; k < elements.size(); ++k) {
        ++owners.at(elements[k]);
        ++taken[rank].at(cut.offsets[rank] + k);
      }
    }
    REQUIRE(std::all_of(owners.begin(), owners.end(), [](int count) { return count == 1; }));
  }
  for (const auto& part : taken) REQUIRE(std::all_of(part.begin(), part.end(), [](int count) { return count <= 1; }));
}

} // namespace

TEST_CASE("layout rows: every element lies in exactly one part, cut as torch.chunk cuts") {
  std::mt19937 random(20261121);
  for (int round = 0; round < 3000; ++round) {
    const auto [shapes, dims, world, alignment] = random_case(random);
    CAPTURE(round, world, alignment, shapes, dims);
    const auto layout = rows(shapes, dims, world, alignment);
    check_partition(layout, shapes, world);
    int64_t largest = 0;
    for (size_t i = 0; i < shapes.size(); ++i) {
      const auto& cut = layout.cuts[i];
      const auto chunk = (shapes[i][dims[i]] + world - 1) / world;
      for (int64_t rank = 0; rank < world; ++rank) {
        REQUIRE(cut.offsets[rank] % alignment == 0);
        const auto left = std::max<int64_t>(shapes[i][dims[i]] - rank * chunk, 0);
        REQUIRE(cut.length(rank) == std::min(chunk, left));
      }
      largest += cut.piece_numel(0) + alignment - 1;
    }
    REQUIRE(layout.part <= largest);
  }
}

TEST_CASE("layout flat: parts in a row are the parameters in a row") {
  std::mt19937 random(20261122);
  for (int round = 0; round < 3000; ++round) {
    const auto [shapes, dims, world, alignment] = random_case(random);
    CAPTURE(round, world, alignment, shapes);
    const auto layout = flat(shapes, world, alignment);
    check_partition(layout, shapes, world);
    REQUIRE(layout.part % alignment == 0);
    int64_t begin = 0;
    for (size_t i = 0; i < shapes.size(); ++i) {
      for (int64_t rank = 0; rank < world; ++rank) {
        if (layout.cuts[i].length(rank) == 0) continue;
        const auto start = layout.cuts[i].starts[rank];
        REQUIRE(rank * layout.part + layout.cuts[i].offsets[rank] == begin + start);
      }
      begin += (c10::multiply_integers(shapes[i]) + alignment - 1) / alignment * alignment;
    }
    REQUIRE(world * layout.part - begin < world * alignment);
  }
}

TEST_CASE("layout: parts with counts, one after the other, are aligned") {
  std::mt19937 random(20261129);
  for (int round = 0; round < 1000; ++round) {
    const auto [shapes, dims, world, none] = random_case(random);
    for (const int64_t bytes : {1, 2, 4, 8, 16}) {
      CAPTURE(round, world, shapes, bytes);
      const auto alignment = shardwise::layout::alignment(bytes);
      for (const auto& layout : {rows(shapes, dims, world, alignment), flat(shapes, world, alignment)}) {
        for (const auto counts : {shapes.size(), shapes.size() + 31}) {
          const auto segment = with_counts(layout, counts, alignment);
          REQUIRE(segment * bytes % 128 == 0);
          const auto filled = layout.part + static_cast<int64_t>(counts);
          REQUIRE(segment >= filled);
          REQUIRE(segment < filled + alignment);
        }
      }
    }
  }
}

TEST_CASE("layout: sizes beyond 32 bits") {
  const int64_t large = int64_t{3} << 32;
  CHECK(flat({{large}, {large + 1}}, 2, 2).part == large + 2);
  CHECK(rows({{large, 2}}, {0}, 2, 1).part == large);
}

TEST_CASE("layout: a dimension that is not there is refused") {
  CHECK_THROWS_AS(rows({{3}}, {1}, 2, 4), shardwise::ValueError);
  CHECK_THROWS_WITH(rows({{3}}, {1}, 2, 4), Catch::Contains("along dimension 1"));
}

TEST_CASE("some parameters keep their pieces, which do not overlap") {
  std::mt19937 random(5);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint32_t>(n)); };
  for (int repeat = 0; repeat < 500; ++repeat) {
    const auto world = 1 + below(6);
    const auto alignment = 1 + below(16);
    Shapes shapes;
    for (int64_t i = 0; i < 6; ++i) shapes.push_back({below(9), 1 + below(5)});
    const auto all = flat(shapes, world, alignment);
    std::vector<size_t> chosen;
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (below(2) == 0) chosen.push_back(i);
    }
    const auto some = some_of(all, chosen, alignment);
    REQUIRE(some.cuts.size() == chosen.size());
    REQUIRE(some.part <= all.part + alignment * static_cast<int64_t>(chosen.size()));
    for (int64_t rank = 0; rank < world; ++rank) {
      int64_t end = 0;
      for (size_t i = 0; i < chosen.size(); ++i) {
        REQUIRE(piece(some.cuts[i], rank) == piece(all.cuts[chosen[i]], rank));
        REQUIRE(some.cuts[i].offsets[rank] >= end);
        REQUIRE(some.cuts[i].offsets[rank] % alignment == 0);
        end = some.cuts[i].offsets[rank] + some.cuts[i].piece_numel(rank);
        REQUIRE(end <= some.part);
      }
    }
  }
}
