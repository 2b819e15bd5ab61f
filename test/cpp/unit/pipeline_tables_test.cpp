// The schedules of a pipeline: that they are right, with and without transfers, what they look like, and where the
// transfers are put. Ranks are played here that know only what they have computed or received.
#include "pipeline/schedules.h"
#include "pipeline/simulate.h"
#include "programs/random.h"

#include <shardwise/error.h>
#include <algorithm>
#include <catch2/catch.hpp>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace shardwise::pipeline {
namespace {

using test::Random;

bool is_transfer(const Action& action) {
  return action.kind >= Kind::send_forward;
}

/// Ranks that carry out a table with transfers: each has only its own data.
class Players {
 public:
  explicit Players(const Table& table) : table_(table), next_(table.of_rank.size(), 0) {}

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
    return data_.count({rank, data, stage, microbatch}) > 0;
  }
  void give(int rank, Data data, int stage, int microbatch) {
    data_.insert({rank, data, stage, microbatch});
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
  std::vector<size_t> next_;
  std::set<std::tuple<int, Data, int, int>> data_;
};

/// Whether each stage takes each microbatch forward and back once, as a whole or in halves, on the rank that has it.
bool does_all_once(const Table& table) {
  std::multiset<std::string> done;
  for (int rank = 0; rank < table.ranks(); ++rank) {
    for (const auto& [kind, stage, microbatch] : table.of_rank[rank]) {
      if (table.rank_of_stage.at(stage) != rank) return false;
      const bool is_whole = kind == Kind::backward;
      done.insert(text({is_whole ? Kind::backward_input : kind, stage, microbatch}));
      if (is_whole) done.insert(text({Kind::backward_weight, stage, microbatch}));
    }
  }
  std::multiset<std::string> all;
  for (int stage = 0; stage < table.stages(); ++stage) {
    for (int microbatch = 0; microbatch < table.microbatches; ++microbatch) {
      for (const auto kind : {Kind::forward, Kind::backward_input, Kind::backward_weight})
        all.insert(text({kind, stage, microbatch}));
    }
  }
  return done == all;
}

/// The stage boundaries that lie between ranks.
int crossings(const Table& table) {
  int count = 0;
  for (int stage = 1; stage < table.stages(); ++stage)
    count += table.rank_of_stage[stage] != table.rank_of_stage[stage - 1];
  return count;
}

void expect_lowers(const Table& table) {
  CHECK(does_all_once(table));
  // Raises an error if the table without transfers does not come to the end.
  const auto lowered = with_transfers(table);
  CHECK(Players(lowered).come_to_the_end());
  auto computing = lowered;
  int transfers = 0;
  for (auto& actions : computing.of_rank) transfers += static_cast<int>(std::erase_if(actions, is_transfer));
  CHECK(computing == table);
  // A send and a receive, each way.
  CHECK(transfers == 4 * crossings(table) * table.microbatches);
}

using Named = std::pair<std::string, Table>;

std::vector<Named> loops_of(int ranks, int stages_per_rank, int microbatches) {
  return {
      {"looped_bfs", looped_bfs(ranks, stages_per_rank, microbatches)},
      {"interleaved", interleaved(ranks, stages_per_rank, microbatches)},
      {"interleaved_zero_bubble", interleaved_zero_bubble(ranks, stages_per_rank, microbatches)}};
}

std::vector<Named> others_of(int ranks, int microbatches) {
  std::vector<Named> all{
      {"gpipe", gpipe(ranks, microbatches)},
      {"one_forward_one_backward", one_forward_one_backward(ranks, microbatches)},
      {"zero_bubble_v", zero_bubble_v(ranks, microbatches)}};
  if (microbatches >= 2 * ranks) all.emplace_back("dual_pipe_v", dual_pipe_v(ranks, microbatches));
  return all;
}

void expect_all_lower(const std::vector<Named>& tables) {
  for (const auto& [name, table] : tables) {
    INFO(
        name + " of " + std::to_string(table.ranks()) + " ranks, " + std::to_string(table.stages()) + " stages, " +
        std::to_string(table.microbatches) + " microbatches");
    expect_lowers(table);
  }
}

TEST_CASE("pipeline tables: every schedule is right") {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int microbatches = 1; microbatches <= 2 * ranks + 3; ++microbatches) {
      expect_all_lower(others_of(ranks, microbatches));
      for (int stages = 1; stages <= 3; ++stages) expect_all_lower(loops_of(ranks, stages, microbatches));
    }
  }
}

TEST_CASE("pipeline tables: schedules in full") {
  CHECK(text(gpipe(2, 2)) == "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1F1 1B0 1B1\n");
  CHECK(
      text(one_forward_one_backward(2, 3)) ==
      "rank 0: 0F0 0F1 0B0 0F2 0B1 0B2\n"
      "rank 1: 1F0 1B0 1F1 1B1 1F2 1B2\n");
  CHECK(
      text(looped_bfs(2, 2, 2)) ==
      "rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1\n"
      "rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1\n");
  CHECK(
      text(interleaved(2, 2, 4)) ==
      "rank 0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3\n"
      "rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3\n");
  // A round of three, then one of two.
  CHECK(
      text(interleaved(1, 2, 1)) + text(interleaved(2, 2, 5)) ==
      "rank 0: 0F0 1F0 1B0 0B0\n"
      "rank 0: 0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4\n"
      "rank 1: 1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4\n");
  CHECK(
      text(interleaved_zero_bubble(2, 1, 3)) ==
      "rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\n"
      "rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2\n");
  CHECK(
      text(zero_bubble_v(2, 3)) ==
      "rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2\n"
      "rank 1: 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2\n");
  CHECK(
      text(dual_pipe_v(2, 4)) ==
      "rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3\n"
      "rank 1: 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3\n");
}

TEST_CASE("pipeline tables: too few of anything is an error") {
  CHECK_THROWS_WITH(
      interleaved(2, -1, 4),
      "shardwise: interleaved() got stages_per_rank=-1; a pipeline has at least one. Give it 1 or more.");
  CHECK_THROWS_WITH(
      zero_bubble_v(2, 0),
      "shardwise: zero_bubble_v() got microbatches=0; a pipeline has at least one. Give it 1 or more.");
  using Maker = Table (*)(int, int);
  using LoopMaker = Table (*)(int, int, int);
  for (const int bad : {0, -3}) {
    for (const Maker make : {gpipe, one_forward_one_backward, zero_bubble_v, dual_pipe_v}) {
      CHECK_THROWS_AS(make(1, bad), ValueError);
    }
    for (const LoopMaker make : {looped_bfs, interleaved, interleaved_zero_bubble}) {
      CHECK_THROWS_AS(make(1, bad, 1), ValueError);
      CHECK_THROWS_AS(make(1, 1, bad), ValueError);
    }
  }
}

TEST_CASE("pipeline tables: dual pipe needs a microbatch for each stage") {
  CHECK_THROWS_AS(dual_pipe_v(3, 5), ValueError);
  CHECK_THROWS_WITH(
      dual_pipe_v(3, 5),
      "shardwise: dual_pipe_v() got microbatches=5 and ranks=3; it needs at least two microbatches for each rank. Use "
      "more, or zero_bubble_v().");
  CHECK_NOTHROW(dual_pipe_v(3, 6));
}

/// The most activations and gradients that a rank has received and not used yet.
int most_unused(const Table& lowered) {
  int most = 0;
  for (const auto& actions : lowered.of_rank) {
    int unused = 0;
    for (const auto& [kind, stage, microbatch] : actions) {
      const bool is_forward = kind == Kind::forward;
      const bool is_backward = kind == Kind::backward || kind == Kind::backward_input;
      const auto from = is_forward ? stage - 1 : stage + 1;
      const bool is_used = (is_forward || is_backward) && from >= 0 && from < lowered.stages() &&
                           lowered.rank_of_stage[from] != lowered.rank_of_stage[stage];
      if (is_used) --unused;
      if (kind == Kind::receive_forward || kind == Kind::receive_backward) most = std::max(most, ++unused);
    }
  }
  return most;
}

TEST_CASE("pipeline lower: transfers in full") {
  CHECK(
      text(with_transfers(one_forward_one_backward(2, 2))) ==
      "rank 0: 0F0 0SF0 0F1 0SF1 0RB0 0B0 0RB1 0B1\n"
      "rank 1: 1RF0 1F0 1RF1 1B0 1SB0 1F1 1B1 1SB1\n");
  // The tip of the V needs none.
  CHECK(text(with_transfers(zero_bubble_v(1, 1))) == "rank 0: 0F0 1F0 1I0 1W0 0I0 0W0\n");
}

/// Stages anywhere, and actions in any order that is possible, with backwards that are whole or in halves.
Table random_table(Random& random) {
  Table table{1 + random.below(4), {}, {}};
  table.of_rank.resize(1 + random.below(5));
  const auto stages = 1 + random.below(7);
  for (int stage = 0; stage < stages; ++stage) table.rank_of_stage.push_back(random.below(table.ranks()));
  std::vector<Action> ready;
  for (int microbatch = 0; microbatch < table.microbatches; ++microbatch)
    ready.push_back({Kind::forward, 0, microbatch});
  while (!ready.empty()) {
    std::swap(ready[random.below(static_cast<int>(ready.size()))], ready.back());
    const auto [kind, stage, microbatch] = ready.back();
    ready.pop_back();
    table.of_rank[table.rank_of_stage[stage]].push_back({kind, stage, microbatch});
    if (kind == Kind::forward && stage + 1 < stages) {
      ready.push_back({Kind::forward, stage + 1, microbatch});
    } else if (kind != Kind::backward_weight && (kind == Kind::forward || stage > 0)) {
      const auto next = kind == Kind::forward ? stage : stage - 1;
      ready.push_back({random.below(2) == 0 ? Kind::backward : Kind::backward_input, next, microbatch});
    }
    if (kind == Kind::backward_input) ready.push_back({Kind::backward_weight, stage, microbatch});
  }
  return table;
}

TEST_CASE("pipeline lower: any order comes to the end") {
  for (unsigned seed = 0; seed < 4000; ++seed) {
    INFO("seed " + std::to_string(seed));
    Random random(seed);
    expect_lowers(random_table(random));
  }
}

TEST_CASE("pipeline lower: few received things wait") {
  for (const int microbatches : {16, 64}) {
    CHECK(most_unused(with_transfers(gpipe(8, microbatches))) == 1);
    CHECK(most_unused(with_transfers(one_forward_one_backward(8, microbatches))) == 2);
    CHECK(most_unused(with_transfers(zero_bubble_v(8, microbatches))) == 3);
    CHECK(most_unused(with_transfers(dual_pipe_v(8, microbatches))) == 2);
    CHECK(most_unused(with_transfers(interleaved(8, 3, microbatches))) == 4);
    CHECK(most_unused(with_transfers(interleaved_zero_bubble(8, 3, microbatches))) == 7);
    // The first rank's second stage has its input long before it comes to it.
    CHECK(most_unused(with_transfers(looped_bfs(8, 2, microbatches))) == microbatches - 7);
  }
}

} // namespace
} // namespace shardwise::pipeline
