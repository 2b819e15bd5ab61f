// Random tables: what with_transfers() and problem_of() make of them, compared with ranks that are played here and know
// only what they have computed or received. A failure prints the seed.
#include "pipeline/check.h"
#include "pipeline/lower.h"
#include "pipeline/schedules.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace shardwise::pipeline {
namespace {

/// The same numbers on every machine.
class PipelineDice {
 public:
  explicit PipelineDice(unsigned seed) : engine_(seed) {}
  int below(size_t count) {
    return static_cast<int>(engine_() % count);
  }

 private:
  std::mt19937 engine_;
};

/// Stages anywhere, and actions in any order that is possible, with backwards that are whole or in halves.
Table random_table(PipelineDice& dice) {
  Table table{1 + dice.below(4), {}, {}};
  table.of_rank.resize(1 + dice.below(5));
  const auto stages = 1 + dice.below(7);
  for (int stage = 0; stage < stages; ++stage) table.rank_of_stage.push_back(dice.below(table.of_rank.size()));
  std::vector<Action> ready;
  for (int microbatch = 0; microbatch < table.microbatches; ++microbatch)
    ready.push_back({Kind::forward, 0, microbatch});
  while (!ready.empty()) {
    std::swap(ready[dice.below(ready.size())], ready.back());
    const auto [kind, stage, microbatch] = ready.back();
    ready.pop_back();
    table.of_rank[table.rank_of_stage[stage]].push_back({kind, stage, microbatch});
    if (kind == Kind::forward && stage + 1 < stages) {
      ready.push_back({Kind::forward, stage + 1, microbatch});
    } else if (kind != Kind::backward_weight && (kind == Kind::forward || stage > 0)) {
      const auto next = kind == Kind::forward ? stage : stage - 1;
      ready.push_back({dice.below(2) == 0 ? Kind::backward : Kind::backward_input, next, microbatch});
    }
    if (kind == Kind::backward_input) ready.push_back({Kind::backward_weight, stage, microbatch});
  }
  return table;
}

/// Ranks that carry out a table. With transfers, each has only its own data; without, all see everything.
class Players {
 public:
  explicit Players(const Table& table, bool has_transfers)
      : table_(table),
        has_transfers_(has_transfers),
        next_(table.of_rank.size(), 0) {}

  bool come_to_the_end() {
    for (bool is_moving = true; is_moving;) {
      is_moving = false;
      for (int rank = 0; rank < table_.ranks(); ++rank) {
        while (next(rank) && play(rank, *next(rank))) is_moving = true;
      }
    }
    for (int rank = 0; rank < table_.ranks(); ++rank) {
      if (next(rank)) return false;
    }
    return true;
  }

 private:
  enum class Data { output, gradient };

  const Action* next(int rank) const {
    const auto& actions = table_.of_rank[rank];
    return next_[rank] < actions.size() ? &actions[next_[rank]] : nullptr;
  }
  bool has(int rank, Data data, int stage, int microbatch) const {
    return data_.count({has_transfers_ ? rank : 0, data, stage, microbatch}) > 0;
  }
  void give(int rank, Data data, int stage, int microbatch) {
    data_.insert({has_transfers_ ? rank : 0, data, stage, microbatch});
    ++next_[rank];
  }
  /// The sender has the data, and the receiver is where it takes them.
  bool send(int rank, Data data, const Action& action, const Action& receive) {
    const auto receiver = table_.rank_of_stage[receive.stage];
    if (!has(rank, data, action.stage, action.microbatch)) return false;
    if (!next(receiver) || *next(receiver) != receive) return false;
    ++next_[rank];
    give(receiver, data, action.stage, action.microbatch);
    return true;
  }

  bool play(int rank, const Action& action) {
    const auto [kind, stage, microbatch] = action;
    switch (kind) {
      case Kind::forward:
        if (stage > 0 && !has(rank, Data::output, stage - 1, microbatch)) return false;
        give(rank, Data::output, stage, microbatch);
        return true;
      case Kind::backward:
      case Kind::backward_input:
        if (!has(rank, Data::output, stage, microbatch)) return false;
        if (stage + 1 < table_.stages() && !has(rank, Data::gradient, stage + 1, microbatch)) return false;
        give(rank, Data::gradient, stage, microbatch);
        return true;
      case Kind::backward_weight:
        if (!has(rank, Data::gradient, stage, microbatch)) return false;
        ++next_[rank];
        return true;
      case Kind::send_forward:
        return send(rank, Data::output, action, {Kind::receive_forward, stage + 1, microbatch});
      case Kind::send_backward:
        return send(rank, Data::gradient, action, {Kind::receive_backward, stage - 1, microbatch});
      default:
        return false;
    }
  }

  const Table& table_;
  bool has_transfers_;
  std::vector<size_t> next_;
  std::set<std::tuple<int, Data, int, int>> data_;
};

/// A rank that has anything to do.
std::vector<Action>& some_list(Table& table, PipelineDice& dice) {
  while (true) {
    auto& actions = table.of_rank[dice.below(table.of_rank.size())];
    if (!actions.empty()) return actions;
  }
}

TEST_CASE("pipeline random: tables lower without deadlock") {
  for (unsigned seed = 0; seed < 4000; ++seed) {
    INFO("seed " + std::to_string(seed));
    PipelineDice dice(seed);
    const auto table = random_table(dice);
    REQUIRE(problem_of(table) == "");
    const auto lowered = with_transfers(table);
    REQUIRE(problem_of(lowered) == "");
    REQUIRE(Players(lowered, true).come_to_the_end());
  }
}

/// Plants a mistake in a right table, anywhere.
void plant_a_mistake(Table& table, PipelineDice& dice) {
  auto& actions = some_list(table, dice);
  const auto at = actions.begin() + dice.below(actions.size());
  // A half of what is done as a whole, or the other way round, is done twice too.
  const auto whole = at->kind == Kind::backward_input ? Kind::backward : at->kind;
  const auto twice = at->kind == Kind::backward ? Kind::backward_input : whole;
  switch (dice.below(7)) {
    case 0:
      actions.erase(at);
      break;
    case 1:
      actions.insert(actions.begin() + dice.below(actions.size()), *at);
      break;
    case 2:
      actions.insert(actions.begin() + dice.below(actions.size()), {twice, at->stage, at->microbatch});
      break;
    case 3:
      at->stage = dice.below(2) == 0 ? -1 : table.stages();
      break;
    case 4:
      at->microbatch = dice.below(2) == 0 ? -1 : table.microbatches;
      break;
    case 5:
      // Nobody is there to send to.
      actions.insert(at, {Kind::send_backward, 0, at->microbatch});
      break;
    default: {
      // Done by another rank.
      const auto action = *at;
      actions.erase(at);
      table.of_rank.push_back({action});
    }
  }
}

TEST_CASE("pipeline random: any mistake is a problem") {
  for (unsigned seed = 0; seed < 4000; ++seed) {
    INFO("seed " + std::to_string(seed));
    PipelineDice dice(seed);
    auto table = random_table(dice);
    if (seed % 2 == 0) table = with_transfers(table);
    plant_a_mistake(table, dice);
    REQUIRE(problem_of(table) != "");
  }
}

TEST_CASE("pipeline random: what is no table, and how a problem reads") {
  CHECK(problem_of({}) == "the table has no ranks");
  CHECK(problem_of({1, {}, {{}}}) == "the table has no stages");
  CHECK(problem_of({0, {0}, {{}}}) == "the table has 0 microbatches");
  CHECK(problem_of({1, {0, 2}, {{}, {}}}) == "stage 1 is on rank 2 of 2");
  CHECK(problem_of({1, {-1}, {{}}}) == "stage 0 is on rank -1 of 1");
  const Action forward{Kind::forward, 0, 0}, backward{Kind::backward, 0, 0};
  CHECK(problem_of({1, {0}, {{forward}}}) == "rank 0 never does 0B0 or 0I0");
  CHECK(problem_of({1, {0}, {{backward, forward}}}) == "rank 0 does 0B0 without 0F0 before it");
  // The last rank wants the second microbatch back before it lets go of the first.
  auto table = one_forward_one_backward(2, 2);
  std::swap(table.of_rank[1][1], table.of_rank[1][2]);
  std::swap(table.of_rank[0][1], table.of_rank[0][2]);
  CHECK(problem_of(table) == "no rank can go on: rank 0 at 0B0, rank 1 at 1F1");
}

TEST_CASE("pipeline random: two actions change places") {
  int right = 0;
  int wrong = 0;
  for (unsigned seed = 0; seed < 4000; ++seed) {
    INFO("seed " + std::to_string(seed));
    PipelineDice dice(seed);
    auto table = random_table(dice);
    const bool is_lowered = seed % 2 == 0;
    if (is_lowered) table = with_transfers(table);
    auto& actions = some_list(table, dice);
    const auto first = dice.below(actions.size());
    const auto second = std::min<size_t>(first + 1 + dice.below(3), actions.size() - 1);
    std::swap(actions[first], actions[second]);
    const bool is_right = problem_of(table).empty();
    REQUIRE(is_right == Players(table, is_lowered).come_to_the_end());
    ++(is_right ? right : wrong);
  }
  CHECK(right > 500);
  CHECK(wrong > 500);
}

} // namespace
} // namespace shardwise::pipeline
