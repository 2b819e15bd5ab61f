// The rows of fully_shard_training that train models cut into units, with ranks that are late, and cut otherwise.
#include "ranks/sharded_wrappings.h"
#include "ranks/training_models.h"
#include "ranks/transformer_model.h"

namespace shardwise::test {
namespace {

const std::vector<StepPoint> kPoints{
    StepPoint::unshard, StepPoint::copy_out, StepPoint::reduce, StepPoint::reduced, StepPoint::publish};

Wrapping<torch::nn::Sequential> as_one_unit() {
  return {[](torch::nn::Sequential& model, Rank& rank) { fully_shard(model, sharded_on(rank)); }};
}

Wrapping<Transformer> by_block(const Reshard& reshard) {
  return {[reshard](Transformer& model, Rank& rank) { wrap_blocks(model, sharding(rank, reshard)); }};
}

/// What a full copy has after unshard(): all there is of the parameter.
void assert_full_copies(Transformer& model, const std::map<std::string, torch::Tensor>& values) {
  std::vector<Unit> units{unit(*model)};
  for (size_t i = 0; i < model->blocks->size(); ++i) units.push_back(unit(*model->block(i)));
  for (auto& unit : units) unit.unshard();
  const std::map<std::string, torch::Tensor> members{
      {"tokens.weight", model->tokens->weight},
      {"blocks.0.norm_1.bias", model->block(0)->norm_1->bias},
      {"blocks.1.attention.mix.weight", model->block(1)->attention->mix->weight},
      {"blocks.2.up.weight", model->block(2)->up->weight},
      {"blocks.2.down.weight", model->block(2)->down->weight},
      {"head.weight", model->head->weight}};
  for (const auto& [name, member] : members) assert_close(member.detach(), values.at(name), "full " + name);
  for (auto& unit : units) unit.reshard();
}

} // namespace

TEST(FullyShard1DTrainingCore, TrainParitySingleGroupShardDim0) {
  for (const auto& widths : kWidths) {
    for (const auto& expected : expect_alone(mlp_program(widths))) train_twice(expected, as_one_unit());
  }
}

TEST(FullyShard1DTrainingCore, TrainParitySingleGroupShardLargestDim) {
  const Wrapping<torch::nn::Sequential> wrapping{
      [](torch::nn::Sequential& model, Rank& rank) { fully_shard(model, sharded_on(rank).shard_placement(longest)); },
      longest};
  for (const auto& widths : kWidths) {
    for (const auto& expected : expect_alone(mlp_program(widths))) train_twice(expected, wrapping);
  }
}

TEST(FullyShard1DTrainingCore, TrainParityMultiGroup) {
  for (const auto& expected : expect_alone(text_program())) {
    AlikeRuns runs;
    for (const auto& reshard : reshards(expected.world)) {
      const bool plain = reshard && reshard->frees() && !reshard->ranks();
      runs.run(expected, by_block(reshard));
      if (plain) runs.run_late(expected, by_block(reshard), kPoints);
    }
  }
}

TEST(FullyShard1DTrainingCore, TrainParityMultiGroupCpuOffloadEager) {
  // On a mesh of CPUs nothing is moved: what there is to see is that all of it is where it should be.
  for (const auto& expected : expect_alone(text_program())) {
    AlikeRuns runs;
    for (const bool pin : {true, false}) {
      Wrapping<Transformer> wrapping{[=](Transformer& model, Rank& rank) {
        wrap_blocks(model, sharding(sharded_on(rank).cpu_offload(CpuOffload().pin_memory(pin))));
      }};
      wrapping.before = [](Transformer& model, int) { assert_on_the_host(*model); };
      runs.run_late(expected, wrapping, {StepPoint::copy_out});
    }
  }
}

TEST(FullyShard1DTrainingCore, TrainParityMultiGroupUnshardAsyncOp) {
  for (const auto& expected : expect_alone(text_program())) {
    AlikeRuns runs;
    runs.run(expected, by_block(true));
    for (const auto& reshard : reshards(expected.world)) {
      auto wrapping = by_block(reshard);
      // All are under way before the forward that uses them; the first is waited for by hand.
      wrapping.before = [](Transformer& model, int) {
        unit(*model).unshard(/*async=*/true).wait();
        for (size_t i = 0; i < model->blocks->size(); ++i) unit(*model->block(i)).unshard(/*async=*/true);
      };
      runs.run(expected, wrapping);
      if (reshard && reshard->frees()) runs.run_late(expected, wrapping, {});
    }
  }
}

TEST(FullyShard1DTrainingCore, NonRootForwardBackward) {
  train_with_each_reshard(non_root_program(), [](torch::nn::Sequential& model, const auto& wrap) {
    for (size_t i = 0; i < 3; ++i) wrap(model[i]);
    wrap(model);
  });
}

TEST(FullyShard1DTrainingCore, MultiForwardModule) {
  train_with_each_reshard(twice_program(), [](Twice& model, const auto& wrap) {
    wrap(model->inner);
    wrap(model);
  });
}

TEST(FullyShard1DTrainingCore, ExplicitPrefetching) {
  for (const auto& expected : expect_alone(text_program({.depth = 8}))) {
    AlikeRuns runs;
    for (const auto& reshard : reshards(expected.world)) {
      if (expected.world > 2 && !frees(reshard, true)) continue; // Nothing to prefetch in backward.
      auto wrapping = by_block(reshard);
      wrapping.wrap = [reshard](Transformer& model, Rank& rank) {
        wrap_blocks(model, sharding(rank, reshard));
        prefetch_two_blocks(model);
        // A forward that ends after the first block has brought the next two, and no more.
        {
          const torch::NoGradGuard guard;
          model->block(0)->forward(torch::ones({1, 2, kWidth}));
        }
        for (size_t i = 0; i < 8; ++i) ASSERT_EQ(unit(*model->block(i)).counters().unshards, i < 3 ? 1 : 0);
        unit(*model).reset();
      };
      runs.run(expected, wrapping);
    }
  }
}

TEST(FullyShard1DTrainingCore, PostOptimEvent) {
  train_with_each_reshard<Transformer>(
      text_program(), [](Transformer& model, const auto& wrap) { wrap_blocks(model, wrap); },
      set_optimizer_event<Transformer>);
}

TEST(FullyShardShardPlacementFnMultiProcess, TrainParityShardPlacementFnShardLargestDim) {
  const Expected<Transformer> expected(text_program(), kSecondWorld);
  run_processes(kSecondWorld, [&](Rank& rank) {
    Transformer ours(nullptr);
    const Wrapping<Transformer> wrapping{
        [&](Transformer& model, Rank& rank) {
          ours = model;
          const auto values = copy_values(*model);
          wrap_blocks(model, sharding(sharded_on(rank).shard_placement(longest)));
          assert_full_copies(model, values);
        },
        longest};
    Trace trace;
    train(rank, expected, wrapping, trace);
    assert_full_copies(ours, expected.single.back().values);
  });
}

TEST(FullyShardShardPlacementFnMultiThread, ShardPlacementFnContiguousParamsGrads) {
  for (const auto& expected : expect_alone(mlp_program({16, 17, 8}))) {
    run_ranks(expected.world, [&](Rank& rank) {
      torch::nn::Sequential ours(nullptr);
      int calls = 0;
      const Wrapping<torch::nn::Sequential> wrapping{
          .wrap =
              [&](torch::nn::Sequential& model, Rank& rank) {
                ours = model;
                fully_shard(model, sharded_on(rank).shard_placement(last_dimension));
                observe_calls(*model);
                // Before the call, and with its memory after it.
                const auto look = [&calls](torch::nn::Module& module, HookTensors&) {
                  auto& linear = dynamic_cast<torch::nn::LinearImpl&>(module);
                  ++calls;
                  ASSERT_TRUE(linear.weight.is_contiguous());
                  ASSERT_EQ(linear.weight.size(1), linear.options.in_features());
                };
                register_forward_pre_hook(*model[2], look);
                register_forward_hook(*model[2], look);
              },
          .dim = [](const std::string&, const torch::Tensor& parameter) { return parameter.dim() - 1; },
          .before =
              [](torch::nn::Sequential& model, int) {
                for (const auto& shard : model->parameters()) ASSERT_TRUE(shard.is_contiguous());
              }};
      Trace trace;
      train(rank, expected, wrapping, trace);
      ASSERT_EQ(calls, 2 * expected.program.steps);
      for (const auto& shard : ours->parameters()) {
        ASSERT_TRUE(shard.is_contiguous());
        ASSERT_TRUE(shard.grad().is_contiguous());
      }
    });
  }
}

} // namespace shardwise::test
