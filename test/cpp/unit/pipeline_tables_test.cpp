// The schedules of a pipeline: that they are right, with and without transfers, what they look like, and where the
// transfers are put.
#include "pipeline/check.h"
#include "pipeline/lower.h"
#include "pipeline/schedules.h"
#include "pipeline/simulate.h"

#include <shardwise/error.h>
#include <algorithm>
#include <catch2/catch.hpp>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::pipeline {
namespace {

bool is_transfer(const Action& action) {
  return action.kind >= Kind::send_forward;
}

/// The stage boundaries that lie between ranks.
int crossings(const Table& table) {
  int count = 0;
  for (int stage = 1; stage < table.stages(); ++stage)
    count += table.rank_of_stage[stage] != table.rank_of_stage[stage - 1];
  return count;
}

void expect_lowers(const Table& table) {
  CHECK(problem_of(table) == "");
  const auto lowered = with_transfers(table);
  CHECK(problem_of(lowered) == "");
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

std::string error_of(const std::function<Table()>& make) {
  try {
    make();
  } catch (const ValueError& error) {
    return error.what();
  }
  return "";
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
  CHECK(error_of([] {
          return gpipe(0, 1);
        }) == "shardwise: gpipe() got ranks=0; a pipeline has at least one. Give it 1 or more.");
  CHECK(error_of([] {
          return interleaved(2, -1, 4);
        }) == "shardwise: interleaved() got stages_per_rank=-1; a pipeline has at least one. Give it 1 or more.");
  CHECK(error_of([] {
          return zero_bubble_v(2, 0);
        }) == "shardwise: zero_bubble_v() got microbatches=0; a pipeline has at least one. Give it 1 or more.");
  using Maker = Table (*)(int, int);
  using LoopMaker = Table (*)(int, int, int);
  for (const int bad : {0, -3}) {
    for (const Maker make : {gpipe, one_forward_one_backward, zero_bubble_v, dual_pipe_v}) {
      CHECK(error_of([&] { return make(bad, 2); }) != "");
      CHECK(error_of([&] { return make(1, bad); }) != "");
    }
    for (const LoopMaker make : {looped_bfs, interleaved, interleaved_zero_bubble}) {
      CHECK(error_of([&] { return make(bad, 1, 1); }) != "");
      CHECK(error_of([&] { return make(1, bad, 1); }) != "");
      CHECK(error_of([&] { return make(1, 1, bad); }) != "");
    }
  }
}

TEST_CASE("pipeline tables: dual pipe needs a microbatch for each stage") {
  CHECK(
      error_of([] { return dual_pipe_v(3, 5); }) ==
      "shardwise: dual_pipe_v() got microbatches=5 and ranks=3; it needs at least two microbatches for each rank. Use "
      "more, or zero_bubble_v().");
  CHECK(error_of([] { return dual_pipe_v(3, 6); }) == "");
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

TEST_CASE("pipeline lower: transfers keep the times") {
  for (int ranks = 1; ranks <= 6; ++ranks) {
    for (const int microbatches : {1, 4, 9, 17}) {
      INFO(std::to_string(ranks) + " ranks, " + std::to_string(microbatches) + " microbatches");
      for (const auto& table :
           {one_forward_one_backward(ranks, microbatches), zero_bubble_v(ranks, microbatches),
            interleaved(ranks, 2, microbatches)}) {
        CHECK(simulate(with_transfers(table)).makespan == simulate(table).makespan);
      }
    }
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

TEST_CASE("pipeline lower: wrong tables and those with transfers are errors") {
  auto table = gpipe(2, 2);
  table.of_rank[1].pop_back();
  CHECK_THROWS_AS(with_transfers(table), ValueError);
  CHECK_THROWS_AS(with_transfers(with_transfers(gpipe(2, 2))), ValueError);
}

} // namespace
} // namespace shardwise::pipeline
