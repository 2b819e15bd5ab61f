// Where with_transfers() puts sends and receives. That the result is right, pipeline_tables_test.cpp checks for all
// schedules, and pipeline_random_test.cpp for random tables.
#include "pipeline/lower.h"
#include "pipeline/schedules.h"
#include "pipeline/simulate.h"

#include <shardwise/error.h>

#include <catch2/catch.hpp>

#include <algorithm>
#include <string>

namespace shardwise::pipeline {
namespace {

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
