#include "pipeline/schedules.h"

#include <shardwise/error.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::pipeline {
namespace {

/// What a schedule is made for. The name is that of the function, for errors.
struct ScheduleShape {
  std::string name;
  int ranks;
  int stages_per_rank;
  int microbatches;
};

void expect_positive(const ScheduleShape& shape, int value, const std::string& what) {
  if (value >= 1) return;
  throw ValueError(
      "shardwise: " + shape.name + "() got " + what + "=" + std::to_string(value) +
      "; a pipeline has at least one. Give it 1 or more.");
}

/// The table in which each rank has the list that `list_of` makes for it, and each stage is on the rank that `rank_of`
/// says. Raises ValueError for less than one stage on a rank, or microbatch.
Table make_table(
    const ScheduleShape& shape, const std::function<int(int stage)>& rank_of,
    const std::function<std::vector<Action>(int rank)>& list_of) {
  expect_positive(shape, shape.stages_per_rank, "stages_per_rank");
  expect_positive(shape, shape.microbatches, "microbatches");
  Table table{shape.microbatches, {}, {}};
  for (int stage = 0; stage < shape.ranks * shape.stages_per_rank; ++stage)
    table.rank_of_stage.push_back(rank_of(stage));
  for (int rank = 0; rank < shape.ranks; ++rank) table.of_rank.push_back(list_of(rank));
  return table;
}

/// What a rank does next, in words that leave the microbatch open: the stage's next one.
/// A half on the weights needs no stage: it belongs to the half on the input that has waited for it longest.
struct Task {
  Kind kind;
  int stage = 0;
};

/// Writes the list of a rank whose stages take the microbatches in order, both forward and backward.
class RankWriter {
 public:
  explicit RankWriter(int microbatches) : microbatches_(microbatches) {}

  /// Writes nothing if there are no microbatches left for it.
  void add(const Task& task) {
    if (task.kind == Kind::backward_weight) {
      if (waiting_.empty()) return;
      actions_.push_back(waiting_.front());
      waiting_.pop_front();
      return;
    }
    const auto microbatch = (task.kind == Kind::forward ? forwards_ : backwards_)[task.stage]++;
    if (microbatch >= microbatches_) return;
    actions_.push_back({task.kind, task.stage, microbatch});
    if (task.kind == Kind::backward_input) waiting_.push_back({Kind::backward_weight, task.stage, microbatch});
  }
  void repeat(int times, std::initializer_list<Task> tasks) {
    for (int i = 0; i < times; ++i) {
      for (const auto& task : tasks) add(task);
    }
  }
  /// The list, with the halves on the weights that still wait at its end.
  std::vector<Action> finish() && {
    actions_.insert(actions_.end(), waiting_.begin(), waiting_.end());
    return std::move(actions_);
  }

 private:
  int microbatches_;
  std::map<int, int> forwards_;
  std::map<int, int> backwards_;
  std::deque<Action> waiting_;
  std::vector<Action> actions_;
};

// The schedules whose stages go round the ranks. They differ in how far the forwards are ahead of the backwards.

/// How the two directions of a rank go together.
struct Pace {
  /// So many forwards come before the first backward. From then on, forward and backward alternate.
  int lead;
  /// So many backwards later the half on the weights follows the one on the input. Without it, backwards are whole.
  std::optional<int> weights_wait;
};

/// How many rounds the microbatches are divided into, so that none is shorter than there are ranks.
int rounds_of(const ScheduleShape& shape) {
  return std::max(1, shape.microbatches / shape.ranks);
}

int longest_round(const ScheduleShape& shape) {
  const auto rounds = rounds_of(shape);
  return (shape.microbatches + rounds - 1) / rounds;
}

/// The stage of each forward of a rank, or of each backward.
std::vector<int> stages_in_turn(const ScheduleShape& shape, int rounds, int rank, bool is_forward) {
  std::vector<int> stages;
  for (int round = 0; round < rounds; ++round) {
    const auto length = shape.microbatches / rounds + (round < shape.microbatches % rounds ? 1 : 0);
    for (int turn = 0; turn < shape.stages_per_rank; ++turn) {
      const auto loop = is_forward ? turn : shape.stages_per_rank - 1 - turn;
      stages.insert(stages.end(), length, loop * shape.ranks + rank);
    }
  }
  return stages;
}

Table loops(const ScheduleShape& shape, int rounds, const std::function<Pace(int rank)>& pace_of) {
  const auto list_of = [&](int rank) {
    const auto forwards = stages_in_turn(shape, rounds, rank, true);
    const auto backwards = stages_in_turn(shape, rounds, rank, false);
    const auto [lead, weights_wait] = pace_of(rank);
    const auto count = static_cast<int>(forwards.size());
    RankWriter writer(shape.microbatches);
    for (int i = 0; i < count + lead; ++i) {
      if (i < count) writer.add({Kind::forward, forwards[i]});
      if (i < lead) continue;
      writer.add({weights_wait ? Kind::backward_input : Kind::backward, backwards[i - lead]});
      if (weights_wait && i - lead >= *weights_wait) writer.add({Kind::backward_weight});
    }
    return std::move(writer).finish();
  };
  return make_table(
      shape, [&](int stage) { return stage % shape.ranks; }, list_of);
}

/// All forwards first.
Table breadth_first(const ScheduleShape& shape) {
  return loops(shape, 1, [&](int) { return Pace{shape.stages_per_rank * shape.microbatches, std::nullopt}; });
}

// The schedules whose stages go down the ranks and up again. A rank's list consists of parts that are repeated, most of
// them the more often the more ranks come before it, or after it.

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

Table gpipe(int ranks, int microbatches) {
  return breadth_first({"gpipe", ranks, 1, microbatches});
}

Table looped_bfs(int ranks, int stages_per_rank, int microbatches) {
  return breadth_first({"looped_bfs", ranks, stages_per_rank, microbatches});
}

Table one_forward_one_backward(int ranks, int microbatches) {
  const ScheduleShape shape{"one_forward_one_backward", ranks, 1, microbatches};
  return loops(shape, 1, [&](int rank) { return Pace{ranks - 1 - rank, std::nullopt}; });
}

Table interleaved(int ranks, int stages_per_rank, int microbatches) {
  const ScheduleShape shape{"interleaved", ranks, stages_per_rank, microbatches};
  // A round through all stages but the last; then a step there and one back for each rank in between.
  return loops(shape, rounds_of(shape), [&](int rank) {
    return Pace{(stages_per_rank - 1) * longest_round(shape) + 2 * (ranks - 1 - rank), std::nullopt};
  });
}

Table interleaved_zero_bubble(int ranks, int stages_per_rank, int microbatches) {
  const ScheduleShape shape{"interleaved_zero_bubble", ranks, stages_per_rank, microbatches};
  // A later rank has fewer forwards ahead, and keeps as many activations more for its weights.
  return loops(shape, rounds_of(shape), [&](int rank) {
    return Pace{(stages_per_rank - 1) * longest_round(shape) + ranks - 1 - rank, rank};
  });
}

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
