// What the pool of full copies, gathers and buckets keeps while the optimizer runs.
#include "comm/collectives/buffers.h"
#include "steps.h"

namespace shardwise::test {

// docs/architecture/steps.md has the figures.
TEST(LatePool, TheOptimizersStepIsNotThePeak) {
  run_ranks(2, [](Rank& rank) {
    Stack model(64, 8);
    auto root = shard_stack(model, sharded_on(rank));
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02));
    auto& device = late::Device::of(rank.rank());
    for (int step = 0; step < 4; ++step) {
      const auto backward = peak_of(device, [&] { stack_loss(model, step, rank.rank()).backward(); });
      const auto between = used_on(device);
      const auto stepped = peak_of(device, [&] { optimizer.step(); });
      optimizer.zero_grad();
      // In the first step the optimizer makes its state.
      if (step == 0) continue;
      EXPECT_LT(stepped, backward);
      root.free_idle_memory();
      const auto pool = between - used_on(device);
      EXPECT_GT(pool, 0);
      EXPECT_LT(pool, between / 9);
    }
  });
}

TEST(LatePool, WhatAGraphUsesStaysItsOwn) {
  const c10::DeviceGuard guard(late_device());
  comm::Buffers buffers;
  Counters counters;
  const auto take = [&] { return buffers.take(100, at::TensorOptions(late_device()).dtype(at::kFloat), counters); };
  const auto place_of_one = [&] {
    const auto taken = take();
    buffers.give(taken);
    return taken.const_data_ptr();
  };
  const auto* first = place_of_one();
  EXPECT_EQ(place_of_one(), first);
  late::Device::of(late_device()).synchronize_all();
  {
    const late::Capturing capturing(0);
    EXPECT_EQ(place_of_one(), first) << "a capture takes what is there, and allocates nothing";
  }
  const auto eager = take();
  EXPECT_NE(eager.const_data_ptr(), first) << "a replay would write there";
  buffers.give(eager);
  buffers.free_idle();
  EXPECT_EQ(counters.allocations, 2);
  {
    const late::Capturing capturing(0);
    EXPECT_EQ(place_of_one(), first) << "it is still there";
  }
  expect_no_fault();
}

// As the graphs of a forward and of its backward, or of two sizes of a batch.
TEST(LatePool, GraphsShareItAndDoNotWaitForEachOther) {
  const c10::DeviceGuard guard(late_device());
  comm::Buffers buffers;
  Counters counters;
  const auto place_of_one = [&](const c10::Stream& stream) {
    const c10::StreamGuard on(stream);
    const auto one = buffers.take(100, at::TensorOptions(late_device()).dtype(at::kFloat), counters);
    buffers.give(one);
    return one.const_data_ptr();
  };
  const auto first = place_of_one(new_stream());
  for (int graph = 0; graph < 2; ++graph) {
    late::Device::of(late_device()).synchronize_all();
    const late::Capturing capturing(0);
    EXPECT_EQ(place_of_one(new_stream()), first);
    EXPECT_EQ(place_of_one(new_stream()), first) << "within a graph, one stream waits for the other";
  }
  expect_no_fault();
}

TEST(LatePool, SoDoesWhatWasTakenBeforeAndGivenBackInIt) {
  const c10::DeviceGuard guard(late_device());
  comm::Buffers buffers;
  Counters counters;
  const auto take = [&] { return buffers.take(100, at::TensorOptions(late_device()).dtype(at::kFloat), counters); };
  const auto held = take();
  late::Device::of(late_device()).synchronize_all();
  {
    const late::Capturing capturing(0);
    buffers.give(held);
  }
  EXPECT_NE(take().const_data_ptr(), held.const_data_ptr()) << "a replay would write there";
}

TEST(LatePool, SoDoFullCopiesThatAreKept) {
  // With one rank the pool has nothing but full copies.
  run_ranks(1, [](Rank& rank) {
    for (const bool stale : {false, true}) {
      const torch::NoGradGuard no_grad;
      torch::nn::Linear first(8, 8), second(8, 8);
      torch::nn::Sequential model(first, second);
      const auto options = sharded_on(rank).reshard_after_forward(false);
      auto kept = fully_shard(first, options);
      auto next = fully_shard(second, options);
      fully_shard(model, options);
      const auto x = torch::ones({4, 8}, rank.device());
      call(first, x);
      const auto* place = first->weight.const_data_ptr();
      if (stale) first->parameters().front().mul_(2);
      late::Device::of(rank.rank()).synchronize_all();
      {
        const late::Capturing capturing(rank.rank());
        call(first, x);
        EXPECT_EQ(first->weight.const_data_ptr(), place);
      }
      kept.reshard();
      next.unshard();
      EXPECT_NE(second->weight.const_data_ptr(), place) << "a replay would read or write there";
    }
  });
}

} // namespace shardwise::test
