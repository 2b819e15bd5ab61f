#include "engine/step_time.h"

#include <catch2/catch.hpp>

using namespace shardwise;
using namespace shardwise::engine;

namespace {

using Kind = StepEvent::Kind;

/// Two layers in an outermost unit without parameters.
std::vector<UnitBytes> two_layers(const GroupBytes& bytes, bool reshards = true) {
  const UnitBytes layer{
      .groups = {bytes},
      .outer = 2,
      .has_full_copies = bytes.part > 0,
      .reshards_after_forward = reshards,
      .is_gathered = bytes.part > 0};
  return {layer, layer, {.groups = {}, .outer = std::nullopt}};
}

const std::vector<StepEvent> kTwoLayers{
    {.kind = Kind::begin, .unit = 2},
    {.kind = Kind::begin, .unit = 0},
    {.kind = Kind::use, .unit = 0, .gradient = 20, .work = 1},
    {.kind = Kind::end, .unit = 0},
    {.kind = Kind::begin, .unit = 1},
    {.kind = Kind::use, .unit = 1, .gradient = 20, .work = 1},
    {.kind = Kind::end, .unit = 1},
    {.kind = Kind::end, .unit = 2}};

const GroupBytes kSharded{.bucket = 20, .sum = 10, .part = 10};

StepRanks ranks_of(int64_t shards, int64_t copies, double bytes_per_second, double latency = 0) {
  return {shards, copies, Links().inside({bytes_per_second, latency})};
}

} // namespace

TEST_CASE("step time: what is gathered ahead travels while the layer before computes") {
  // A forward of a layer computes for 2 s, its backward for 4 s; a gather or a sum travels for 2 s.
  const auto time = time_steps(two_layers(kSharded), kTwoLayers, ranks_of(2, 1, 5), 12);
  CHECK(time.wire == Approx(2 * 2 * 2 + 2 * 2));
  // Ranks wait for the first gather of either pass, and for the last sum.
  CHECK(time.step == Approx(12 + 3 * 2));
  // Kept: nothing is gathered in backward.
  const auto kept = time_steps(two_layers(kSharded, false), kTwoLayers, ranks_of(2, 1, 5), 12);
  CHECK(kept.wire == Approx(2 * 2 + 2 * 2));
  CHECK(kept.step == Approx(12 + 2 * 2));
}

TEST_CASE("step time: a wire that is slower than the rest decides") {
  const auto time = time_steps(two_layers(kSharded), kTwoLayers, ranks_of(2, 1, 1), 0);
  CHECK(time.wire == Approx(6 * 10));
  CHECK(time.step == Approx(time.wire));
  const auto late = time_steps(two_layers(kSharded), kTwoLayers, ranks_of(2, 1, 1, 0.5), 0);
  CHECK(late.step == Approx(6 * 10.5));
  // Copies: twice half of the sum, of which only the last layer's is not hidden.
  const auto copies = time_steps(two_layers({.sum = 20}), kTwoLayers, ranks_of(1, 2, 10), 12);
  CHECK(copies.wire == Approx(2 * 2));
  CHECK(copies.step == Approx(12 + 2));
  CHECK(time_steps(two_layers({.sum = 20}), kTwoLayers, ranks_of(1, 1, 10), 12).step == Approx(12));
}

TEST_CASE("step time: the ranks of a host share its link to others") {
  auto four = ranks_of(4, 1, 10);
  four.links.between({5, 0.25}).ranks_per_host(2);
  // Three parts of 10 come to a rank in 3 s, but the two from the other host take 4 s.
  CHECK(time_steps(two_layers(kSharded), kTwoLayers, four, 0).wire == Approx(6 * 4.25));
  auto copies = ranks_of(2, 2, 10);
  copies.links.between({5, 0}).ranks_per_host(2);
  // Gathers and scattered sums stay on a host, 1 s each; two all-reduces of 10 share the link: halves, twice.
  CHECK(time_steps(two_layers(kSharded), kTwoLayers, copies, 0).wire == Approx(6 * 1 + 2 * 2 * 2));
  auto apart = ranks_of(4, 1, 0);
  apart.links.between({5, 0}).ranks_per_host(1);
  CHECK(time_steps(two_layers(kSharded), kTwoLayers, apart, 0).wire == Approx(6 * 6));
}

TEST_CASE("step time: what is computed without parameters counts too") {
  auto events = kTwoLayers;
  for (auto& event : events) event.work = 0;
  CHECK(time_steps(two_layers(kSharded), events, ranks_of(2, 1, 5), 12).step == Approx(12 + 6 * 2));
}

TEST_CASE("step time: what a rank holds after forward is gathered among fewer") {
  auto held = kSharded;
  held.held = 20;
  // Two ranks that hold half each, instead of four with a quarter.
  CHECK(time_steps(two_layers(held), kTwoLayers, ranks_of(4, 1, 10), 0).wire == Approx(2 * (3 + 2 + 3)));
}
