// Random tables: what with_transfers() and problem_of() make of them, compared with ranks that are played here and know
// only what they have computed or received. A failure prints the seed.
#include "pipeline/check.h"
#include "pipeline/lower.h"

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
