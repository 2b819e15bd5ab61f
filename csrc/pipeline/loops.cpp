// The schedules whose stages go round the ranks. They differ in how far the forwards are ahead of the backwards.
#include "pipeline/make.h"
#include "pipeline/rank_writer.h"
#include "pipeline/schedules.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace shardwise::pipeline {
namespace {

/// How the two directions of a rank go together.
struct Pace {
  /// So many forwards come before the first backward. From then on, forward and backward alternate.
  int lead;
  /// So many backwards later the half on the weights follows the one on the input. Without it, backwards are whole.
  std::optional<int> weights_wait;
};

/// How many rounds the microbatches are divided into, so that none is shorter than there are ranks.
/// The shape may still be one that make_table() raises for.
int rounds_of(const ScheduleShape& shape) {
  return std::max(1, shape.microbatches / std::max(1, shape.ranks));
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

} // namespace shardwise::pipeline
