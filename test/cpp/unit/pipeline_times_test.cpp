// How long the schedules of a pipeline take and how much they hold, against what they promise. The numbers of idle time
// are exact for equal stages: a forward and each half of a backward take 1.
#include "pipeline/schedules.h"
#include "pipeline/simulate.h"

#include <catch2/catch.hpp>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

namespace shardwise::pipeline {
namespace {

/// How long each rank is idle. All compute equally long in these schedules.
double idle_time(const Table& table) {
  const auto times = simulate(table);
  for (const auto busy : times.busy) CHECK(busy == times.busy[0]);
  return times.makespan - times.busy[0];
}

/// The most microbatches in a round of an interleaved schedule.
int longest_round_of(int ranks, int microbatches) {
  const auto rounds = std::max(1, microbatches / ranks);
  return (microbatches + rounds - 1) / rounds;
}

/// For each rank the largest number of activations that it holds at once. It holds one for each microbatch of each of
/// its stages from the forward to the end of the backward, or of its half on the weights.
std::vector<int> peak_activations(const Table& table) {
  std::vector<int> peaks;
  for (const auto& actions : table.of_rank) {
    int held = 0;
    int peak = 0;
    for (const auto& action : actions) {
      if (action.kind == Kind::forward) peak = std::max(peak, ++held);
      if (action.kind == Kind::backward || action.kind == Kind::backward_weight) --held;
    }
    peaks.push_back(peak);
  }
  return peaks;
}

void expect_peaks(const Table& table, const std::function<int(int rank)>& promised) {
  const auto peaks = peak_activations(table);
  for (int rank = 0; rank < table.ranks(); ++rank) CHECK(peaks[rank] == promised(rank));
}

template <class Fn>
void for_many_shapes(const Fn& fn) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (const int microbatches : {1, 2, 3, 5, 8, 11, 15, 16, 17, 32}) {
      INFO(std::to_string(ranks) + " ranks, " + std::to_string(microbatches) + " microbatches");
      fn(ranks, microbatches);
    }
  }
}

TEST_CASE("pipeline times: idle time of one stage on a rank") {
  for_many_shapes([&](int ranks, int microbatches) {
    for (const auto& table : {gpipe(ranks, microbatches), one_forward_one_backward(ranks, microbatches)}) {
      const auto promised = (ranks - 1.0) / (microbatches + ranks - 1.0);
      for (const auto bubble : simulate(table).bubble) CHECK(bubble == Approx(promised).margin(1e-12).epsilon(0));
    }
  });
}

TEST_CASE("pipeline times: idle time of several stages on a rank") {
  for_many_shapes([](int ranks, int microbatches) {
    if (microbatches < ranks) return;
    for (int stages = 1; stages <= 4; ++stages) {
      // That of 1F1B, whose stages are as many times longer.
      CHECK(idle_time(looped_bfs(ranks, stages, microbatches)) == 3 * (ranks - 1));
      CHECK(idle_time(interleaved(ranks, stages, microbatches)) == 3 * (ranks - 1));
      CHECK(idle_time(interleaved_zero_bubble(ranks, stages, microbatches)) == ranks - 1);
    }
  });
  const auto whole = simulate(one_forward_one_backward(8, 64)).bubble[0];
  const auto quarters = simulate(interleaved(8, 4, 64)).bubble[0];
  CHECK(whole / quarters == Approx(4).margin(0.4).epsilon(0));
}

TEST_CASE("pipeline times: idle time of stages in a V") {
  for_many_shapes([](int ranks, int microbatches) {
    if (microbatches >= 2 * ranks) {
      CHECK(idle_time(dual_pipe_v(ranks, microbatches)) == ranks - 1);
    }
    if (microbatches < 2 * ranks - 1) return;
    const auto table = zero_bubble_v(ranks, microbatches);
    CHECK(idle_time(table) == ranks - 1);
    // Only before its first action and after its last one.
    const auto times = simulate(table);
    for (int rank = 0; rank < ranks; ++rank) {
      CHECK(times.of_rank[rank].front().begin == rank);
      CHECK(times.of_rank[rank].back().end == rank + times.busy[rank]);
    }
  });
  const auto many = simulate(zero_bubble_v(8, 512)).bubble[0];
  CHECK(many == Approx(7.0 / (6 * 512 + 7)).margin(1e-12).epsilon(0));
}

TEST_CASE("pipeline times: held activations") {
  for_many_shapes([](int ranks, int microbatches) {
    expect_peaks(gpipe(ranks, microbatches), [&](int) { return microbatches; });
    expect_peaks(
        one_forward_one_backward(ranks, microbatches), [&](int rank) { return std::min(microbatches, ranks - rank); });
    for (int stages = 1; stages <= 4; ++stages) {
      const auto all = stages * microbatches;
      const auto before = (stages - 1) * longest_round_of(ranks, microbatches);
      expect_peaks(looped_bfs(ranks, stages, microbatches), [&](int) { return all; });
      expect_peaks(interleaved(ranks, stages, microbatches), [&](int rank) {
        return std::min(all, before + 2 * (ranks - 1 - rank) + 1);
      });
      expect_peaks(
          interleaved_zero_bubble(ranks, stages, microbatches), [&](int) { return std::min(all, before + ranks); });
    }
    const bool is_full = microbatches >= 2 * ranks - 1;
    expect_peaks(zero_bubble_v(ranks, microbatches), [&](int rank) {
      return is_full ? 2 * ranks : std::min({2 * microbatches, 2 * ranks, microbatches + 1 + rank});
    });
    if (microbatches >= 2 * ranks) expect_peaks(dual_pipe_v(ranks, microbatches), [&](int) { return 2 * ranks + 1; });
  });
}

} // namespace
} // namespace shardwise::pipeline
