// fully_shard on a mesh of two axes: everything that has to do with the second sum, and the rows of
// fully_shard_training.
#include "ranks/hybrid_models.h"
#include "ranks/microbatches.h"
#include "ranks/sharded_wrappings.h"

namespace shardwise::test {
TEST(FullyShardHybrid, PartialSumsWaitForTheAllReduce) {
  // R12: kept apart from .grad, through failures and changes of what is trained.
  on_grids<Stack>({{2, 2}, {2, 1}, {1, 2}}, shallow_stack, [](Pair<Stack>& both, FullyShardOptions options) {
    auto root = shard_stack(both.ours, options);
    for (int step = 0; step < 12; step += 3) {
      root.set_requires_all_reduce(false);
      both.backward(stack_loss, step);
      for (const auto& parameter : both.ours->parameters()) ASSERT_FALSE(parameter.grad().defined());
      both.backward(stack_loss, step + 1);
      // Frozen and back: what it brought so far is not lost.
      both.each([](Stack& model) { set_trained(*model->block(0), false); });
      root.set_requires_all_reduce(true);
      if (step == 6) {
        const auto bad = stack_loss(both.ours, 99, both.rank.rank()) * 1;
        bad.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("on purpose"); });
        ASSERT_THROW(bad.backward(), std::runtime_error);
      }
      both.each([](Stack& model) { set_trained(*model->block(0), true); });
      both.backward(stack_loss, step + 2);
      both.finish(step);
    }
  });
}

TEST(FullyShardHybrid, UnusedOnSomeRanks) {
  // T03: a count is summed along both axes; a partial sum brings its own.
  on_grids<Branches>(
      {{2, 2}, {2, 1}}, [] { return Branches(); },
      [](Pair<Branches>& both, FullyShardOptions options) {
        auto root = fully_shard(both.ours, options);
        const auto loss = [&](const std::vector<std::string>& some, const std::vector<std::string>& others, int only) {
          return [=](Branches& model, int step, int r) {
            return model->forward(batch(step, r, 3), r == only ? some : others).pow(2).sum();
          };
        };
        const int last = both.rank.world_size() - 1;
        for (int step = 0; step < 8; step += 2) {
          root.set_requires_all_reduce(false);
          both.backward(loss({"left"}, {}, last), step);
          root.set_requires_all_reduce(true);
          both.backward(loss({}, {}, -1), step + 1);
          ASSERT_FALSE(both.ours->right->parameters()[0].grad().defined());
          both.finish(step);
        }
        both.train(loss({"right"}, {"left"}, 1), 2, 50);
      });
}

TEST(FullyShardHybrid, DivideFactorOfAReplicatedUnit) {
  run_ranks(2, [](Rank& rank) {
    torch::nn::Linear model(2, 1);
    auto unit = replicate(model, on(rank));
    for (const double wrong : {0.0, -1.0, std::nan("")}) {
      expect_error<ValueError>([&] { unit.set_gradient_divide_factor(wrong); }, {"divide factor", "above 0"});
    }
    unit.set_gradient_divide_factor(1);
    call(model, torch::full({1, 2}, 1.0 + rank.rank())).sum().backward();
    ASSERT_TRUE(torch::equal(model->weight.grad(), torch::full({1, 2}, 3.0)));
  });
}

TEST(FullyShardHybrid, RanksThatDifferAlongEitherAxis) {
  // Everyone hears of it, also ranks that differ from none of their peers along an axis.
  for (const int odd : {1, 2, 3}) {
    run_ranks(4, [&](Rank& rank) {
      torch::nn::Sequential model(torch::nn::Linear(4, rank.rank() == odd ? 5 : 4));
      expect_error<Error>(
          [&] {
            fully_shard(model, hybrid_on(rank, {2, 2}));
          },
          {"the ranks wrap different modules", "0.weight"});
      rank.close();
    });
    run_ranks(4, [&](Rank& rank) {
      auto model = shallow_stack();
      auto root = shard_stack(model, hybrid_on(rank, {2, 2}));
      for (int step = 0; step < 3; ++step) stack_loss(model, step, rank.rank()).backward();
      if (rank.rank() == odd) root.set_requires_gradient_sync(false);
      expect_error<Error>(
          [&] {
            stack_loss(model, 3, rank.rank()).backward();
            stack_loss(model, 4, rank.rank()).backward();
          },
          {"the ranks do not run the same units in the same order", "a backward that sums"});
      rank.close();
    });
  }
}

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
      train_on_ranks(expected, wrapping);
    }
  }
}

} // namespace shardwise::test
