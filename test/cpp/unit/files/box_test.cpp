#include "files/box.h"

#include <shardwise/error.h>
#include <catch2/catch.hpp>

#include <numeric>
#include <random>

using shardwise::files::Box;
using shardwise::files::boxes_of_range;
using shardwise::files::cover_error;
using shardwise::files::for_each_run;
using shardwise::files::intersection;
using shardwise::files::product_of;
using shardwise::files::Run;
using shardwise::files::Sizes;

namespace {

/// The row-major indices, in the whole tensor, of a box's elements, in the order of the box.
std::vector<int64_t> elements(const Box& box, const Sizes& whole) {
  std::vector<int64_t> result{0};
  for (size_t dim = 0; dim < whole.size(); ++dim) {
    std::vector<int64_t> longer;
    for (const auto index : result) {
      for (int64_t i = 0; i < box.sizes[dim]; ++i) longer.push_back(index * whole[dim] + box.offsets[dim] + i);
    }
    result = std::move(longer);
  }
  return result;
}

struct Random {
  std::mt19937 engine;

  int64_t below(int64_t bound) {
    return static_cast<int64_t>(engine() % static_cast<uint64_t>(bound));
  }
  Sizes sizes(int64_t most_dims = 4) {
    Sizes result(below(most_dims + 1));
    for (auto& size : result) size = below(10) == 0 ? 0 : 1 + below(5);
    return result;
  }
  Box box(const Sizes& whole) {
    Box result = Box::whole(whole);
    for (size_t dim = 0; dim < whole.size(); ++dim) {
      result.offsets[dim] = below(whole[dim] + 1);
      result.sizes[dim] = below(whole[dim] - result.offsets[dim] + 1);
    }
    return result;
  }
  /// Boxes that hold each element once: cut in two again and again.
  std::vector<Box> partition(const Sizes& whole) {
    std::vector<Box> result{Box::whole(whole)};
    for (int64_t cuts = below(8); cuts > 0 && !whole.empty(); --cuts) {
      auto& one = result[below(static_cast<int64_t>(result.size()))];
      const auto dim = below(static_cast<int64_t>(whole.size()));
      auto other = one;
      const auto length = below(one.sizes[dim] + 1);
      one.sizes[dim] = length;
      other.offsets[dim] += length;
      other.sizes[dim] -= length;
      result.push_back(other);
    }
    std::shuffle(result.begin(), result.end(), engine);
    return result;
  }
};

} // namespace

TEST_CASE("checkpoint box: runs copy what two boxes have in common from one to the other, as long as they can be") {
  Random random{std::mt19937(2)};
  for (int round = 0; round < 5000; ++round) {
    const auto whole = random.sizes();
    const auto from = random.box(whole);
    const auto to = random.box(whole);
    CAPTURE(round, whole, text_of(from), text_of(to));
    constexpr int64_t kBytes = 4;
    const auto source = elements(from, whole);
    auto expected = elements(to, whole);
    std::vector<int64_t> wanted;
    std::set_intersection(source.begin(), source.end(), expected.begin(), expected.end(), std::back_inserter(wanted));
    const auto piece = intersection(from, to);
    REQUIRE(piece.has_value() == !wanted.empty());
    if (!piece) continue;
    std::vector<int64_t> copied(to.numel(), -1);
    std::vector<Run> runs;
    for_each_run(*piece, from, to, kBytes, [&](const Run& run) { runs.push_back(run); });
    for (size_t i = 0; i < runs.size(); ++i) {
      const auto& run = runs[i];
      REQUIRE(run.bytes > 0);
      REQUIRE(run.bytes % kBytes + run.from % kBytes + run.to % kBytes == 0);
      for (int64_t k = 0; k < run.bytes / kBytes; ++k)
        copied.at(run.to / kBytes + k) = source.at(run.from / kBytes + k);
      if (i == 0) continue;
      const auto& last = runs[i - 1];
      REQUIRE(run.from >= last.from + last.bytes);
      REQUIRE(run.to >= last.to + last.bytes);
      const bool is_one_run = run.from == last.from + last.bytes && run.to == last.to + last.bytes;
      REQUIRE_FALSE(is_one_run);
    }
    for (auto& element : expected) {
      if (!std::binary_search(wanted.begin(), wanted.end(), element)) element = -1;
    }
    REQUIRE(copied == expected);
  }
}

TEST_CASE("checkpoint box: boxes cover a tensor when each element is in one of them") {
  Random random{std::mt19937(3)};
  for (int round = 0; round < 3000; ++round) {
    const auto whole = random.sizes();
    auto boxes = random.partition(whole);
    CAPTURE(round, whole);
    REQUIRE(cover_error(whole, boxes).empty());
    // Moved, doubled or dropped, a box with elements leaves or makes something that is not there once.
    const auto changed = random.below(static_cast<int64_t>(boxes.size()));
    const auto kind = random.below(3);
    if (kind == 0) boxes.push_back(boxes[changed]);
    if (kind == 1) boxes.erase(boxes.begin() + changed);
    if (kind == 2) boxes[changed] = random.box(whole);
    std::vector<int> counts(*product_of(whole));
    for (const auto& box : boxes) {
      for (const auto element : elements(box, whole)) ++counts[element];
    }
    const bool covered = std::all_of(counts.begin(), counts.end(), [](int count) { return count == 1; });
    REQUIRE(cover_error(whole, boxes).empty() == covered);
  }
}

TEST_CASE("checkpoint box: an error names the first element that is missing, and what is there twice") {
  CHECK(cover_error({4, 3}, {{{0, 0}, {2, 3}}, {{3, 0}, {1, 3}}}) == "the element [2, 0] of [4, 3] is missing");
  CHECK(cover_error({4, 3}, {{{0, 0}, {4, 1}}, {{0, 2}, {4, 1}}}) == "the element [0, 1] of [4, 3] is missing");
  CHECK(cover_error({}, {}) == "the element [] of [] is missing");
  CHECK(
      cover_error({4, 3}, {{{0, 0}, {3, 3}}, {{2, 1}, {2, 2}}}) ==
      "the elements [1, 2] at [2, 1] are there more than once");
  // As many elements as there are, but not the right ones.
  CHECK(cover_error({4}, {{{0}, {2}}, {{1}, {2}}}) == "the elements [1] at [1] are there more than once");
  CHECK_THAT(cover_error({4}, {{{0}, {5}}}), Catch::Contains("the piece [5] at [0] does not lie in the whole"));
  CHECK_THAT(cover_error({4}, {{{-1}, {5}}}), Catch::Contains("does not lie in the whole"));
  const int64_t large = int64_t{1} << 40;
  CHECK_THAT(cover_error({large, large}, {}), Catch::Contains("larger than any can be"));
}

TEST_CASE("checkpoint box: a range of the flattened tensor is a few boxes, in its order") {
  Random random{std::mt19937(4)};
  for (int round = 0; round < 5000; ++round) {
    const auto sizes = random.sizes();
    const auto numel = *product_of(sizes);
    const auto first = random.below(numel + 1);
    const auto count = random.below(numel - first + 1);
    CAPTURE(round, sizes, first, count);
    const auto boxes = boxes_of_range(sizes, first, count);
    std::vector<int64_t> found;
    for (const auto& box : boxes) {
      REQUIRE(box.numel() > 0);
      const auto here = elements(box, sizes);
      found.insert(found.end(), here.begin(), here.end());
    }
    std::vector<int64_t> expected(count);
    std::iota(expected.begin(), expected.end(), first);
    REQUIRE(found == expected);
    REQUIRE(boxes.size() <= std::max<size_t>(2 * sizes.size(), 2) - 1);
  }
  CHECK(boxes_of_range({3, 4}, 1, 10).size() == 3);
  CHECK(boxes_of_range({3, 4}, 4, 8).size() == 1);
  CHECK_THROWS_WITH(boxes_of_range({3, 4}, 8, 5), Catch::Contains("sizes [3, 4] has no range of 5 elements"));
  CHECK_THROWS_AS(boxes_of_range({3, 4}, -1, 2), shardwise::ValueError);
  CHECK_THROWS_AS(boxes_of_range({3, 4}, 0, -2), shardwise::ValueError);
  const int64_t large = int64_t{3} << 32;
  CHECK(boxes_of_range({large, 2}, large, large).front() == Box{{large / 2, 0}, {large / 2, 2}});
}
