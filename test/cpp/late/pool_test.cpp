// What the pool of full copies, gathers and buckets keeps while the optimizer runs.
#include "steps.h"

namespace shardwise::test {

// docs/architecture.md has the figures.
TEST(LatePool, TheOptimizersStepIsNotThePeak) {
  run_ranks(2, [](Rank& rank) {
    Stack model(64, 8);
    auto root = shard_stack(model, sharded_on(rank));
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02));
    auto& device = late::Device::of(rank.rank());
    const auto used = [&] {
      device.synchronize_all();
      return static_cast<int64_t>(device.used());
    };
    const auto peak_of = [&](const auto& act) {
      used();
      device.reset_peak();
      act();
      device.synchronize_all();
      return static_cast<int64_t>(device.peak());
    };
    for (int step = 0; step < 4; ++step) {
      const auto backward = peak_of([&] { stack_loss(model, step, rank.rank()).backward(); });
      const auto between = used();
      const auto stepped = peak_of([&] { optimizer.step(); });
      optimizer.zero_grad();
      // In the first step the optimizer makes its state.
      if (step == 0) continue;
      EXPECT_LT(stepped, backward);
      root.free_idle_memory();
      const auto pool = between - used();
      EXPECT_GT(pool, 0);
      EXPECT_LT(pool, between / 9);
    }
  });
}

} // namespace shardwise::test
