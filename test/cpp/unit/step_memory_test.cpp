#include "engine/step_memory.h"

#include <catch2/catch.hpp>

using namespace shardwise::engine;

namespace {

using Kind = StepEvent::Kind;

/// Two layers in an outermost unit without parameters.
std::vector<UnitBytes> layers(const GroupBytes& bytes, bool reshards) {
  const UnitBytes layer{
      .groups = {bytes}, .outer = 2, .has_full_copies = true, .reshards_after_forward = reshards, .is_gathered = true};
  return {layer, layer, {.groups = {}, .outer = std::nullopt}};
}

std::vector<StepEvent> events(int64_t gradient) {
  return {{Kind::begin, 2}, {Kind::begin, 0},         {Kind::use, 0, gradient}, {Kind::end, 0},
          {Kind::begin, 1}, {Kind::use, 1, gradient}, {Kind::end, 1},           {Kind::end, 2}};
}

} // namespace

TEST_CASE("step memory: nothing comes of nothing") {
  CHECK(walk_steps({}, {}).pool == 0);
  const auto peaks = walk_steps({{}}, {{Kind::begin, 0}, {Kind::end, 0}});
  CHECK(peaks.forward == 0);
  CHECK(peaks.backward == 0);
}

TEST_CASE("step memory: a layer computes while the next is gathered") {
  // The first is whole, with the second's copies and what is gathered for it.
  const auto peaks = walk_steps(layers({.full = 100, .gathered = 100}, true), events(0));
  CHECK(peaks.forward == 300);
  CHECK(peaks.pool == 300);
  CHECK(peaks.backward == 300);
}

TEST_CASE("step memory: full copies that stay until backward") {
  const auto kept = walk_steps(layers({.full = 100}, false), events(0));
  CHECK(kept.forward == 200);
  CHECK(walk_steps(layers({.full = 100, .held = 10}, true), events(0)).forward >= 210);
}

TEST_CASE("step memory: gradients wait for all of their unit, and for a bucket") {
  const auto peaks = walk_steps(layers({.bucket = 60}, true), events(50));
  CHECK(peaks.local_gradients == 50);
  CHECK(peaks.backward == 110);
  CHECK(peaks.pool == 60);
  auto two = events(50);
  two.insert(two.begin() + 3, {Kind::use, 0, 30});
  CHECK(walk_steps(layers({.bucket = 60}, true), two).local_gradients == 80);
}

TEST_CASE("step memory: in a stream a sum starts once its unit was closed") {
  auto units = layers({.full = 100, .bucket = 60}, true);
  for (auto& unit : units) unit.sums_in_stream = true;
  // The second unit's full copies are freed before its bucket is taken, and the bucket comes to lie there.
  const auto peaks = walk_steps(units, events(50));
  CHECK(peaks.pool == 200);
  CHECK(peaks.local_gradients == 50);
  CHECK(walk_steps(layers({.full = 100, .bucket = 60}, true), events(50)).pool == 260);
}

TEST_CASE("step memory: gradients of a rank that is alone stay") {
  auto units = layers({.full = 10}, true);
  for (auto& unit : units) unit.is_summed = unit.is_gathered = false;
  const auto peaks = walk_steps(units, events(50));
  CHECK(peaks.local_gradients == 100);
  CHECK(peaks.forward == 10);
}

TEST_CASE("step memory: a unit is not summed before those ahead of it") {
  // The first layer comes last in backward, but the outermost unit's own gradients come first and wait for all.
  auto units = layers({.bucket = 60}, true);
  units[2].groups = {{.bucket = 10}};
  auto all = events(50);
  all.insert(all.end() - 1, {Kind::use, 2, 7});
  const auto peaks = walk_steps(units, all);
  CHECK(peaks.local_gradients == 57);
  CHECK(peaks.backward == 60 + 57);
  CHECK(peaks.pool == 60);
}
