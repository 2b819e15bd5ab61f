// reshard_after_forward(k): k ranks in a row hold everything together between forward and backward.
#include "ranks/hybrid_models.h"

namespace shardwise::test {
namespace {

constexpr int kWorld = 4;

} // namespace

TEST(FullyShardNeighbours, ParityInBothLayouts) {
  for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
    run_ranks(kWorld, [&](Rank& rank) {
      auto both = stacks(rank, sharded_on(rank).layout(layout).reshard_after_forward(2), 5, 2);
      const auto root = unit(*both.ours);
      const auto before = root.counters();
      for (int step = 0; step < 4; ++step) {
        both.backward(stack_loss, step);
        if (layout == ShardLayout::rows) both.check("step " + std::to_string(step));
        both.optimize();
      }
      assert_state(full_state_dict(*both.ours), plain_state(*both.reference), "the end");
      // In four steps three units in forward, and two in backward, for a direct call of the root has no end. The state
      // dict: each unit once, and two for the exchange before.
      ASSERT_EQ(root.counters().all_gathers - before.all_gathers, 4 * (3 + 2) + 3 + 2);
    });
  }
}

TEST(FullyShardNeighbours, BackwardGathersWhatTheNeighboursHold) {
  run_ranks(kWorld, [](Rank& rank) {
    torch::nn::Linear model(torch::nn::LinearOptions(64, 64).bias(false));
    auto unit = fully_shard(model, sharded_on(rank).reshard_after_forward(2));
    const int64_t full = 64 * 64 * 4;
    const int64_t sum = unit.plan().units[0].groups[0].bucket_bytes;
    for (const bool by_hand : {false, true, false}) {
      const auto before = unit.counters().collective_bytes;
      const auto loss = call(model, batch(0, rank.rank(), 64)).sum();
      ASSERT_EQ(unit.counters().collective_bytes - before, full / 4);
      // Two ranks hold everything, each a half. After reshard() by hand nothing is left of it, and all are asked.
      if (by_hand) unit.reshard();
      loss.backward();
      const auto in_backward = unit.counters().collective_bytes - before - full / 4 - sum;
      ASSERT_EQ(in_backward, by_hand ? full / 4 : full / 2);
    }
    torch::nn::Sequential layers(
        torch::nn::Linear(torch::nn::LinearOptions(64, 64).bias(false)), torch::nn::Linear(64, 1));
    auto inner = fully_shard(layers->ptr(0), sharded_on(rank).reshard_after_forward(2));
    fully_shard(layers, sharded_on(rank));
    for (int step = 0; step < 3; ++step) {
      const auto before = inner.counters().collective_bytes;
      layers->forward(batch(step, rank.rank(), 64)).sum().backward();
      ASSERT_EQ(inner.counters().collective_bytes - before, full / 4 + full / 2 + sum);
    }
  });
}

TEST(FullyShardNeighbours, WritesBetweenForwardAndBackward) {
  // What was held is out of date once a shard is written: the backward gathers from all.
  run_ranks(kWorld, [](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank).reshard_after_forward(2), 5, 2);
    both.train(stack_loss, 2);
    const torch::NoGradGuard guard;
    for (int step = 10; step < 13; ++step) {
      // A forward alone, then a write, then another forward: of the new values.
      stack_loss(both.ours, step, rank.rank());
      both.each([](Stack& model) {
        for (auto& parameter : model->parameters()) parameter.mul_(1.01);
      });
      assert_close(
          stack_loss(both.ours, step, rank.rank()), stack_loss(both.reference, step, rank.rank()), "the new values");
    }
  });
}

TEST(FullyShardNeighbours, OneIsToKeepAndAllIsToFree) {
  run_ranks(kWorld, [](Rank& rank) {
    const auto gathers = [&](int ranks) {
      auto model = shallow_stack();
      const auto root = shard_stack(model, sharded_on(rank).reshard_after_forward(ranks));
      const auto before = root.counters().all_gathers;
      stack_loss(model, 0, rank.rank()).backward();
      return root.counters().all_gathers - before;
    };
    ASSERT_EQ(gathers(1), 3);
    ASSERT_EQ(gathers(kWorld), 5);
    for (const int wrong : {3, 0, -1, 5, 8}) {
      expect_error<ValueError>(
          [&] { gathers(wrong); }, {"reshard_after_forward", "a factor of 4", "not " + std::to_string(wrong)});
    }
    // An outer unit that cannot be made leaves the inner ones as they were.
    Pair<Stack> both{rank, shallow_stack(), shallow_stack()};
    shard_blocks(both.ours, sharded_on(rank));
    ASSERT_THROW(fully_shard(both.ours, sharded_on(rank).reshard_after_forward(3)), ValueError);
    const auto root = fully_shard(both.ours, sharded_on(rank));
    ASSERT_EQ(root.plan().units.size(), 3);
    both.train(stack_loss, 3);
  });
}

} // namespace shardwise::test
