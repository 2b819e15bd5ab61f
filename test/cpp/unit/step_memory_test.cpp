#include "engine/step_memory.h"
#include "comm/collectives/idle_choice.h"

#include <catch2/catch.hpp>

using namespace shardwise::engine;

namespace {

using Kind = StepEvent::Kind;

/// Two layers in an outermost unit without parameters.
std::vector<UnitBytes> layers(const GroupBytes& bytes) {
  const UnitBytes layer{
      .groups = {bytes}, .outer = 2, .has_full_copies = true, .reshards_after_forward = true, .is_gathered = true};
  return {layer, layer, {.groups = {}, .outer = std::nullopt}};
}

std::vector<StepEvent> events(int64_t gradient) {
  return {{Kind::begin, 2}, {Kind::begin, 0},         {Kind::use, 0, gradient}, {Kind::end, 0},
          {Kind::begin, 1}, {Kind::use, 1, gradient}, {Kind::end, 1},           {Kind::end, 2}};
}

} // namespace

TEST_CASE("step memory: what is held between forward and backward") {
  CHECK(walk_steps(layers({.full = 100, .gathers_into_full = true, .held = 10}), events(0)).forward >= 210);
}

TEST_CASE("step memory: gradients of a rank that is alone stay") {
  auto units = layers({.full = 10});
  for (auto& unit : units) unit.is_summed = unit.is_gathered = false;
  const auto peaks = walk_steps(units, events(50));
  CHECK(peaks.unsummed_gradients == 100);
  CHECK(peaks.forward == 10);
}

TEST_CASE("step memory: a unit is not summed before those ahead of it") {
  // The first layer comes last in backward, but the outermost unit's own gradients come first and wait for all.
  auto units = layers({.bucket = 60});
  units[2].groups = {{.bucket = 10}};
  auto all = events(50);
  all.insert(all.end() - 1, {Kind::use, 2, 7});
  const auto peaks = walk_steps(units, all);
  CHECK(peaks.unsummed_gradients == 57);
  CHECK(peaks.backward == 60 + 57);
  CHECK(peaks.pool == 60);
}

TEST_CASE("idle memory: a large piece does not serve a small request") {
  constexpr int64_t kMiB = 1 << 20;
  const std::vector<int64_t> pieces{16 * kMiB, 4 * kMiB};
  const auto choose = [&](int64_t size) {
    return shardwise::comm::choose_idle(
        pieces.size(), size, [&](size_t i) { return std::optional(std::pair(pieces[i], i)); });
  };
  CHECK(choose(2 * kMiB).serves == 1);
  CHECK(choose(5 * kMiB).serves == 0);
  // Nothing is freed for it either: a later request may be larger.
  CHECK(!choose(kMiB / 2).serves);
  CHECK(!choose(kMiB / 2).gives_way);
  CHECK(choose(20 * kMiB).gives_way == 0);
}
