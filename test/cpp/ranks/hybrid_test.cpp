// fully_shard on a mesh of two axes: everything that has to do with the second sum.
#include "ranks/hybrid_models.h"

namespace shardwise::test {
namespace {

Unit shard(Pair<Stack>& both, const FullyShardOptions& options) {
  const auto root = shard_stack(both.ours, options);
  both.mine = torch::optim::AdamW(both.ours->parameters(), torch::optim::AdamWOptions(0.02));
  return root;
}

} // namespace

TEST(FullyShardHybrid, ParityOnEveryGrid) {
  on_grids<Stack>(kGrids, shallow_stack, [](Pair<Stack>& both, FullyShardOptions options) {
    const auto root = shard(both, options);
    both.train(stack_loss);
    const auto counters = root.counters();
    ASSERT_EQ(counters.all_reduces > 0, both.rank.world_size() > both.shards);
    ASSERT_EQ(counters.reduce_scatters > 0, both.shards > 1);
  });
}

TEST(FullyShardHybrid, PartialSumsWaitForTheAllReduce) {
  // R12: kept apart from .grad, through failures and changes of what is trained.
  on_grids<Stack>({{2, 2}, {2, 1}, {1, 2}}, shallow_stack, [](Pair<Stack>& both, FullyShardOptions options) {
    auto root = shard(both, options);
    for (int step = 0; step < 12; step += 3) {
      root.set_requires_all_reduce(false);
      both.backward(stack_loss, step);
      for (const auto& parameter : both.ours->parameters()) ASSERT_FALSE(parameter.grad().defined());
      both.backward(stack_loss, step + 1);
      // Frozen and back: what it brought so far is not lost.
      for (auto* model : {&both.ours, &both.reference}) {
        for (auto& parameter : (*model)->block(0)->parameters()) parameter.set_requires_grad(false);
      }
      root.set_requires_all_reduce(true);
      const bool failed = step == 6;
      if (failed) {
        const auto bad = [&](Stack& model, int number, int r) {
          auto loss = stack_loss(model, number, r);
          auto probe = loss * 1;
          probe.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("on purpose"); });
          return probe;
        };
        ASSERT_THROW(bad(both.ours, 99, both.rank.rank()).backward(), std::runtime_error);
      }
      for (auto* model : {&both.ours, &both.reference}) {
        for (auto& parameter : (*model)->block(0)->parameters()) parameter.set_requires_grad(true);
      }
      both.backward(stack_loss, step + 2);
      both.check("step " + std::to_string(step));
      both.optimize();
    }
  });
}

TEST(FullyShardHybrid, UnusedOnSomeRanks) {
  // T03: a count is summed along both axes; a partial sum brings its own.
  on_grids<Branches>(
      {{2, 2}, {2, 1}}, [] { return Branches(); },
      [](Pair<Branches>& both, FullyShardOptions options) {
        auto root = fully_shard(both.ours, options);
        both.mine = torch::optim::AdamW(both.ours->parameters(), torch::optim::AdamWOptions(0.02));
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
          both.check("step " + std::to_string(step));
          both.optimize();
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

} // namespace shardwise::test
