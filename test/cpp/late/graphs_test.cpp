// What goes on after a step was captured into a graph. A replay changes values on the device, and the host sees
// nothing.
#include "optim/counted_state.h"
#include "steps.h"

#include <shardwise/optimizers.h>

namespace shardwise::test {
namespace {

/// As a replay does: no version moves, and no tensor of the model is used.
void double_unseen(Rank& rank, Stack& model) {
  late::Device::of(rank.rank()).synchronize_all();
  for (const auto& parameter : model->parameters()) {
    at::for_blob(parameter.mutable_data_ptr(), {parameter.numel()})
        .options(at::TensorOptions(rank.device()).dtype(at::kFloat))
        .target_device(rank.device())
        .make_tensor()
        .mul_(2);
  }
}

template <typename Act>
auto capture(Rank& rank, const Act& act) {
  late::Device::of(rank.rank()).synchronize_all();
  const late::Capturing capturing(rank.rank());
  return act();
}

} // namespace

TEST(LateGraphs, GatherAllThatTheyUseAndLeaveNothingToOthers) {
  run_ranks(2, [](Rank& rank) {
    const torch::NoGradGuard no_grad;
    Stack model;
    auto root = shard_stack(model, sharded_on(rank));
    const auto batch = tokens(0, rank.rank());
    const auto gathers = [&] {
      const auto before = root.counters().unshards;
      call(model, batch);
      return root.counters().unshards - before;
    };
    const auto all = gathers();
    EXPECT_LT(gathers(), all) << "the root's are kept";
    // A replay needs what is in the shards by then, and what a capture gathered is nowhere before a replay.
    EXPECT_EQ(capture(rank, gathers), all);
    EXPECT_EQ(capture(rank, gathers), all) << "of another graph";
    EXPECT_EQ(gathers(), all);
  });
}

TEST(LateGraphs, AForwardSeesWhatAReplayChanged) {
  run_ranks(2, [](Rank& rank) {
    Stack model, reference;
    shard_stack(model, sharded_on(rank));
    const auto batch = tokens(0, rank.rank());
    const auto evaluate = [&](Stack& of) {
      const torch::NoGradGuard no_grad;
      return call(of, batch);
    };
    shard_stack(reference, sharded_on(rank));
    evaluate(model);
    capture(rank, [&] { return evaluate(model); });
    evaluate(model);
    double_unseen(rank, model);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : reference->parameters()) parameter.mul_(2);
    }
    EXPECT_TRUE(at::equal(evaluate(model).cpu(), evaluate(reference).cpu()));
  });
}

TEST(LateGraphs, StepsOfReplaysAreCounted) {
  run_ranks(1, [](Rank& rank) {
    Stack model;
    shard_stack(model, sharded_on(rank));
    const auto batch = tokens(0, 0);
    AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02));
    const auto step = [&] {
      optimizer.zero_grad();
      call(model, batch).sum().backward();
      optimizer.step();
      return 0;
    };
    for (int k = 0; k < 3; ++k) step();
    capture(rank, step);
    const auto saved_steps = [&] {
      auto dict = full_optimizer_state_dict(model, optimizer);
      return dict["state.head.weight.step"].item<double>();
    };
    EXPECT_EQ(saved_steps(), 4) << "this device runs what is captured";
    for (auto& [parameter, state] : optimizer.state()) {
      static_cast<optim::CountedState<torch::optim::AdamWParamState>&>(*state).count_on(rank.device()).add_(3);
    }
    EXPECT_EQ(saved_steps(), 7) << "three replays";
    step();
    EXPECT_EQ(saved_steps(), 8);
  });
}

} // namespace shardwise::test
