// How often the host waits for the device in a step.
#include "ranks/hybrid_models.h"
#include "steps.h"
#include "support/expect.h"
#include "support/recorded_calls.h"

namespace shardwise::test {

TEST(LateEngine, ASteadyStepMayBeCaptured) {
  run_ranks(4, [](Rank& rank) {
    const auto flat = sharded_on(rank).layout(ShardLayout::flat);
    const auto hybrid = hybrid_on(rank, {2, 2});
    const auto halves =
        sharded_on(rank).mixed_precision(MixedPrecision().param_dtype(at::kBFloat16).reduce_dtype(at::kFloat));
    for (const auto& options :
         {sharded_on(rank), sharded_on(rank).reshard_after_forward(false), flat, hybrid, halves}) {
      Stack model;
      shard_stack(model, options);
      EXPECT_EQ(waits_of_training(rank, model, /*captured=*/true), 0);
    }
    Stack model;
    replicate(model, ReplicateOptions().mesh(rank.mesh()));
    EXPECT_EQ(waits_of_training(rank, model, /*captured=*/true), 0);
  });
}

// A replay would go on with what the host saw during the capture.
TEST(LateEngine, ACaptureInWhichTheHostMustWaitIsRefused) {
  run_ranks(2, [](Rank& rank) {
    const auto batch = tokens(0, rank.rank());
    const auto x = torch::ones({2, 6}, rank.device());
    const auto is_refused = [&](const std::function<void()>& act, const std::vector<std::string>& words) {
      for (int step = 0; step < 3; ++step) act();
      late::Device::of(rank.rank()).synchronize_all();
      {
        const late::Capturing capturing(rank.rank());
        expect_error<Error>(act, words);
      }
      // This device runs what is captured.
      late::Device::of(rank.rank()).synchronize_all();
    };
    for (const bool pin : {true, false}) {
      Stack model;
      shard_stack(model, sharded_on(rank).cpu_offload(CpuOffload().pin_memory(pin)));
      is_refused(
          [&] { call(model, batch).sum().backward(); },
          {"a graph is being captured", "take the gradient of '", "cpu_offload"});
    }
    Stack model;
    shard_stack(model, sharded_on(rank));
    is_refused(
        [&] { model->block(0)->norm->forward(x).sum().backward(); },
        {"a graph is being captured", "whether other ranks used the parameter 'blocks.0.up.weight'",
         "set_reduce_scatter_unused_params(true)"});
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02));
    GradScaler scaler;
    scaler.scale(call(model, batch).sum()).backward();
    is_refused(
        [&] {
          scaler.step(optimizer);
          scaler.update();
        },
        {"a graph is being captured", "GradScaler", "leave the optimizer out"});
  });
}

TEST(LateEngine, ClippingMakesTheHostWaitForNothing) {
  run_ranks(4, [](Rank& rank) {
    for (const auto& options : {sharded_on(rank), hybrid_on(rank, {2, 2})}) {
      for (const double order : {2.0, std::numeric_limits<double>::infinity()}) {
        Stack model;
        shard_stack(model, options);
        const auto clip = [&] { clip_grad_norm_(model->parameters(), 0.01, order); };
        EXPECT_EQ(waits_of_training(rank, model, /*captured=*/false, clip), 0);
      }
    }
    Stack model;
    replicate(model, ReplicateOptions().mesh(rank.mesh()));
    EXPECT_EQ(waits_of_training(rank, model, /*captured=*/false, [&] { clip_grad_norm_(model, 0.01); }), 0);
  });
}

TEST(LateEngine, OurOptimizersAndGradScalerMakeTheHostWaitForNothing) {
  run_ranks(2, [](Rank& rank) {
    const auto waits = [&](const auto& make, const auto& wrap) {
      Stack model;
      wrap(model);
      const auto optimizer = make(model->parameters());
      const auto batch = tokens(0, rank.rank());
      GradScaler scaler;
      return waits_of_a_step(rank, [&] {
        optimizer->zero_grad();
        scaler.scale(call(model, batch).pow(2).mean()).backward();
        scaler.unscale_(*optimizer);
        clip_grad_norm_(model, 0.1);
        scaler.step(*optimizer);
        scaler.update();
      });
    };
    const auto shard = [&](Stack& model) { shard_stack(model, sharded_on(rank)); };
    const auto copy = [&](Stack& model) { replicate(model, ReplicateOptions().mesh(rank.mesh())); };
    const auto adam = [](const auto& parameters) {
      return std::make_unique<AdamW>(parameters, torch::optim::AdamWOptions(0.02).amsgrad(true));
    };
    const auto sgd = [](const auto& parameters) {
      return std::make_unique<SGD>(parameters, torch::optim::SGDOptions(0.02).momentum(0.9));
    };
    const auto other = [](const auto& parameters) {
      return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.02));
    };
    EXPECT_EQ(waits(adam, shard), 0);
    EXPECT_EQ(waits(adam, copy), 0);
    EXPECT_EQ(waits(sgd, shard), 0);
    EXPECT_EQ(waits(other, shard), 1) << "only the host can leave out this one's step";
  });
}

TEST(LateEngine, ClippingTakesAllGradientsTogether) {
  // As many operations for a model of two blocks as for one of six.
  run_ranks(1, [](Rank& rank) {
    const auto calls_for = [&](int64_t depth) {
      Stack model(6, depth);
      shard_stack(model, sharded_on(rank));
      stack_loss(model, 0, rank.rank()).backward();
      const RecordedCalls calls;
      clip_grad_norm_(model, 0.01);
      return calls.counts();
    };
    for (const auto* name : {"aten::_foreach_norm", "aten::_foreach_mul_"}) {
      EXPECT_GT(calls_for(2)[name], 0) << name;
      EXPECT_EQ(calls_for(2)[name], calls_for(6)[name]) << name;
    }
  });
}

TEST(LateEngine, TheHostWaitsOnceWhereParametersAreUnused) {
  // Every rank leaves a parameter of each block unused, another one on each.
  run_ranks(2, [](Rank& rank) {
    for (const auto& options : {sharded_on(rank), sharded_on(rank).cpu_offload(CpuOffload())}) {
      Stack model;
      shard_stack(model, options);
      const auto step = [&] {
        model->zero_grad();
        auto x = torch::ones({2, 6}, rank.device());
        for (int i = 0; i < 3; ++i) {
          auto block = model->block(i);
          x = rank.rank() == 0 ? block->up->forward(x).narrow(1, 0, 6) : block->norm->forward(x);
        }
        x.sum().backward();
        for (int i = 0; i < 3; ++i) {
          auto block = model->block(i);
          ASSERT_TRUE(block->up->weight.grad().defined() && block->norm->weight.grad().defined());
          ASSERT_FALSE(block->down->weight.grad().defined());
        }
        ASSERT_FALSE(model->head->weight.grad().defined());
      };
      EXPECT_EQ(waits_of_a_step(rank, step), 1);
    }
  });
}

} // namespace shardwise::test
