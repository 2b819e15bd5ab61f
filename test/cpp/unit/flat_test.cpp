#include "layout/flat.h"

#include <shardwise/error.h>
#include <catch2/catch.hpp>

#include <numeric>
#include <random>

using shardwise::layout::flat;

TEST_CASE("flat layout: every element of every tensor lies in exactly one place") {
  std::mt19937 random(20240501);
  const auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % bound); };
  for (int round = 0; round < 5000; ++round) {
    const int64_t alignment = 1 + below(round % 2 == 0 ? 4 : 64);
    std::vector<int64_t> numels(below(12));
    // Empty tensors, tensors of one element, and sizes around a multiple of the alignment.
    for (auto& numel : numels) {
      numel = below(4) == 0 ? below(2) : std::max<int64_t>(0, alignment * below(6) + below(3) - 1);
    }
    CAPTURE(round, alignment, numels);
    const auto layout = flat(numels, alignment);

    REQUIRE(layout.offsets.size() == numels.size());
    REQUIRE(layout.total % alignment == 0);
    std::vector<int> owners(layout.total, 0);
    for (size_t i = 0; i < numels.size(); ++i) {
      REQUIRE(layout.offsets[i] % alignment == 0);
      REQUIRE(layout.offsets[i] >= 0);
      REQUIRE(layout.offsets[i] + numels[i] <= layout.total);
      for (int64_t k = 0; k < numels[i]; ++k) ++owners[layout.offsets[i] + k];
    }
    REQUIRE(std::all_of(owners.begin(), owners.end(), [](int count) { return count <= 1; }));

    const auto elements = std::accumulate(numels.begin(), numels.end(), int64_t{0});
    const auto tensors = std::count_if(numels.begin(), numels.end(), [](int64_t numel) { return numel > 0; });
    REQUIRE(std::accumulate(owners.begin(), owners.end(), int64_t{0}) == elements);
    REQUIRE(layout.total - elements <= tensors * (alignment - 1));
    REQUIRE(layout == flat(numels, alignment));
  }
}

TEST_CASE("flat layout: tensors keep their order") {
  const std::vector<int64_t> numels{5, 0, 8, 1};
  const auto layout = flat(numels, 4);
  CHECK(layout.offsets == std::vector<int64_t>{0, 8, 8, 16});
  CHECK(layout.total == 20);
}

TEST_CASE("flat layout: nothing takes no room") {
  CHECK(flat({}, 16).total == 0);
  CHECK(flat(std::vector<int64_t>{0, 0, 0}, 16).total == 0);
}

TEST_CASE("flat layout: sizes beyond 32 bits") {
  const int64_t large = int64_t{3} << 32;
  const auto layout = flat(std::vector<int64_t>{large, large + 1, 7}, 2);
  CHECK(layout.offsets == std::vector<int64_t>{0, large, 2 * large + 2});
  CHECK(layout.total == 2 * large + 10);
}

TEST_CASE("flat layout: bad sizes are refused") {
  CHECK_THROWS_AS(flat(std::vector<int64_t>{3, -1}, 4), shardwise::ValueError);
  CHECK_THROWS_WITH(flat(std::vector<int64_t>{3, -1}, 4), Catch::Contains("-1 elements"));
  for (const int64_t alignment : {0, -4}) {
    CHECK_THROWS_AS(flat(std::vector<int64_t>{3}, alignment), shardwise::ValueError);
    CHECK_THROWS_WITH(
        flat(std::vector<int64_t>{3}, alignment),
        Catch::Contains("is " + std::to_string(alignment) + "; it must be 1"));
  }
}
