// The rows of fully_shard_training on a mesh of two axes, and what they take.
#include "ranks/hybrid_models.h"
#include "ranks/microbatches.h"
#include "ranks/sharded_wrappings.h"

namespace shardwise::test {
namespace {

/// A norm, then MLPs, each perhaps with its forward done again in backward.
Program<torch::nn::Sequential> norm_and_mlps(int64_t width, bool checkpointed) {
  return {
      [width] {
        torch::nn::Sequential model(torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
        const auto rest = mlps(width, 3);
        for (const auto& part : *rest) model->push_back(part);
        return model;
      },
      [=](torch::nn::Sequential& model, int number, int rank) {
        auto x = batch_for(model, number, rank, width);
        for (auto& part : *model) {
          const auto run = [part](const torch::Tensor& input) {
            auto module = part;
            return module.forward(input);
          };
          x = checkpointed ? activation_checkpoint(run, x) : run(x);
        }
        return x.pow(2).mean();
      },
      by_form(3, 5), kMicrobatches};
}

Wrapping<torch::nn::Sequential> on_grid(Grid grid, bool reshard, bool sync_at_last) {
  return {
      .wrap =
          [=](torch::nn::Sequential& model, Rank& rank) {
            const auto wrap = sharding(hybrid_on(rank, grid).reshard_after_forward(reshard));
            for (auto& part : *model) wrap(part.ptr());
            wrap(model);
          },
      .shards = grid.shards,
      .before =
          [=](torch::nn::Sequential& model, int part) {
            if (sync_at_last) unit(*model).set_requires_gradient_sync(part == kMicrobatches - 1);
          }};
}

} // namespace

TEST(FullyShardHSDPTraining, TrainParityHsdp) {
  for (const int64_t width : by_form<std::vector<int64_t>>({3}, {3, 16, 17})) {
    for (const bool checkpointed : {false, true}) {
      for (const int world : by_form<std::vector<int>>({4}, {2, 4})) {
        const Expected<torch::nn::Sequential> expected(norm_and_mlps(width, checkpointed), world);
        for (const bool sync_at_last : {false, true}) {
          AlikeRuns runs;
          for (const bool reshard : {true, false}) {
            const Grid grid{2, world / 2};
            SCOPED_TRACE(c10::str(
                grid.name(), ", width ", width, ", checkpointed ", checkpointed, ", sync at last ", sync_at_last,
                ", reshard ", reshard));
            runs.run(expected, on_grid(grid, reshard, sync_at_last));
          }
        }
      }
    }
  }
}

TEST(FullyShardHybrid, EveryGridAndLateRanks) {
  const auto program = norm_and_mlps(5, false);
  for (const auto grid : by_form<std::vector<Grid>>({{2, 2}}, {{2, 2}, {2, 3}, {4, 2}, {1, 2}, {2, 1}})) {
    SCOPED_TRACE(grid.name());
    const Expected<torch::nn::Sequential> expected(program, grid.world());
    AlikeRuns runs;
    std::vector<StepPoint> points{StepPoint::unshard, StepPoint::reduce};
    if (grid.copies > 1) points.push_back(StepPoint::all_reduce);
    if (grid.world() < 8) runs.run_late(expected, on_grid(grid, true, false), points);
    runs.run(expected, on_grid(grid, true, false));
  }
}

TEST(FullyShardHybrid, AccumulationTakesTheseCollectives) {
  const Grid grid{2, 2};
  const Expected<torch::nn::Sequential> expected(accumulation_program(), grid.world());
  const auto wrap = [=](torch::nn::Sequential& model, Rank& rank) {
    wrap_mlps(model, sharding(hybrid_on(rank, grid).reshard_after_forward(true)));
  };
  for (const auto waiting : kWaiting) {
    SCOPED_TRACE(c10::str("waiting ", static_cast<int>(waiting)));
    for (const bool scatter_only : {false, true}) {
      Wrapping<torch::nn::Sequential> wrapping{.wrap = wrap, .shards = grid.shards};
      wrapping.before = [=](torch::nn::Sequential& model, int part) {
        if (!scatter_only) return set_flags(model, part, waiting, /*keep_full=*/false);
        const bool last = part == kMicrobatches - 1;
        if (waiting == Waiting::some_mlps) {
          for (size_t i : {1, 2}) unit(*model[i]).set_requires_all_reduce(last);
        } else {
          unit(*model).set_requires_all_reduce(last, /*recurse=*/waiting == Waiting::all);
        }
      };
      // As torch's row has them: with scatter_only every unit is scattered each time.
      wrapping.collectives = Collectives{
          .all_gathers = 8 * kMicrobatches,
          .reduce_scatters = scatter_only ? 4 * kMicrobatches : reductions(waiting),
          .all_reduces = reductions(waiting)};
      // The order of the additions differs: sums over shards first, or over microbatches.
      AlikeRuns run;
      run.run(expected, wrapping);
    }
  }
}

} // namespace shardwise::test
