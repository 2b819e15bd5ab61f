// The schedules whose stages go down the ranks and up again. A rank's list consists of parts that are repeated, most of
// them the more often the more ranks come before it, or after it.
#include "pipeline/make.h"
#include "pipeline/rank_writer.h"
#include "pipeline/schedules.h"

#include <shardwise/error.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::pipeline {
namespace {

/// The tasks of a rank: forward, whole backward, and half on the input, each on the way down and on the way up.
struct Tasks {
  explicit Tasks(int ranks, int rank) : down(rank), up(2 * ranks - 1 - rank) {}

  int down;
  int up;
  Task forward_down{Kind::forward, down};
  Task forward_up{Kind::forward, up};
  Task backward_down{Kind::backward, down};
  Task backward_up{Kind::backward, up};
  Task input_down{Kind::backward_input, down};
  Task input_up{Kind::backward_input, up};
  Task weight{Kind::backward_weight};
};

std::vector<Action> zero_bubble_list(int ranks, int rank, int microbatches) {
  const Tasks s(ranks, rank);
  const auto after = ranks - 1 - rank;
  RankWriter writer(microbatches);
  writer.repeat(2 * after + 1, {s.forward_down});
  writer.repeat(rank, {s.forward_up, s.forward_down});
  writer.repeat(after + 1, {s.forward_up, s.input_up, s.weight});
  // The last of these have no microbatch left to take down.
  writer.repeat(microbatches - ranks, {s.forward_down, s.input_down, s.weight, s.forward_up, s.input_up, s.weight});
  writer.repeat(rank, {s.input_down, s.input_up});
  writer.repeat(after + 1, {s.input_down, s.weight});
  return std::move(writer).finish();
}

std::vector<Action> dual_pipe_list(int ranks, int rank, int microbatches) {
  const Tasks s(ranks, rank);
  const auto after = ranks - 1 - rank;
  RankWriter writer(microbatches);
  writer.repeat(2 * after, {s.forward_down});
  writer.repeat(rank + 1, {s.forward_down, s.forward_up});
  writer.repeat(after, {s.input_up, s.weight, s.forward_up});
  writer.repeat(microbatches - 2 * ranks + rank + 1, {s.forward_down, s.backward_up, s.forward_up, s.backward_down});
  writer.repeat(after, {s.backward_up, s.forward_up, s.backward_down});
  // Up and down in turn: the first rank + 1 backwards are whole, as many more are in halves.
  writer.repeat((rank + 1) / 2, {s.backward_up, s.backward_down});
  writer.repeat((rank + 1) % 2, {s.backward_up, s.input_down});
  writer.repeat((rank + 1) / 2, {s.input_up, s.input_down});
  writer.repeat(after, {s.weight, s.input_down});
  return std::move(writer).finish();
}

/// What makes the list of one rank.
using MakeList = std::vector<Action>(int ranks, int rank, int microbatches);

Table v_shaped(const std::string& name, int ranks, int microbatches, MakeList* make_list) {
  return make_table(
      {name, ranks, 2, microbatches}, [&](int stage) { return std::min(stage, 2 * ranks - 1 - stage); },
      [&](int rank) { return make_list(ranks, rank, microbatches); });
}

} // namespace

Table zero_bubble_v(int ranks, int microbatches) {
  return v_shaped("zero_bubble_v", ranks, microbatches, zero_bubble_list);
}

Table dual_pipe_v(int ranks, int microbatches) {
  if (microbatches < 2 * ranks) {
    throw ValueError(
        "shardwise: dual_pipe_v() got microbatches=" + std::to_string(microbatches) + " and ranks=" +
        std::to_string(ranks) + "; it needs at least two microbatches for each rank. Use more, or zero_bubble_v().");
  }
  return v_shaped("dual_pipe_v", ranks, microbatches, dual_pipe_list);
}

} // namespace shardwise::pipeline
