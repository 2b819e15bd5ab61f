// fully_shard(): the ways in which programs run their modules. All results are those of plain LibTorch.
#include "ranks/fully_shard_models.h"

namespace shardwise::test {
TEST(FullyShardPrograms, FrozenBetweenForwardAndBackward) {
  const auto loss = [](Stack& model, int step, int r) {
    set_trained(*model->block(0), true);
    auto loss = stack_loss(model, step, r);
    set_trained(*model->block(0), step % 2 == 0);
    return loss;
  };
  for (const auto* way : {"sharded", "kept", "replicated"}) {
    run_ranks(2, [&](Rank& rank) {
      Stack ours;
      if (way == std::string("replicated")) {
        replicate(ours, ReplicateOptions().mesh(rank.mesh()));
      } else {
        shard_stack(ours, sharded_on(rank).reshard_after_forward(way != std::string("kept")));
      }
      Pair<Stack> both{rank, ours, Stack()};
      both.shards = way == std::string("replicated") ? 1 : 2;
      for (int step = 0; step < 4; ++step) {
        both.backward(loss, step);
        both.check(c10::str(way, ", step ", step));
        if (step % 2 == 1) both.optimize();
      }
    });
  }
}

TEST(FullyShardPrograms, EvaluationBetweenStepsAndOptimizerBetweenForwards) {
  // T06: full copies that are kept follow the optimizer. T22: a forward in inference mode leaves nothing behind.
  on_ranks([](Rank& rank) {
    for (const bool reshard : {true, false}) {
      auto both = stacks(rank, sharded_on(rank).reshard_after_forward(reshard));
      const auto evaluate = [&](int step) {
        assert_close(both.ours->forward(tokens(step, 0)), both.reference->forward(tokens(step, 0)), "evaluation");
      };
      for (int step = 0; step < 3; ++step) {
        {
          const c10::InferenceMode guard;
          evaluate(step);
        }
        both.backward(stack_loss, step);
        {
          const torch::NoGradGuard guard;
          evaluate(step + 10);
        }
        both.check("before the optimizer");
        both.optimize();
        const torch::NoGradGuard guard;
        evaluate(step + 20);
        both.each([](Stack& model) {
          for (auto& parameter : model->parameters()) parameter.mul_(0.9);
        });
        evaluate(step + 30);
      }
    }
  });
}

TEST(FullyShardPrograms, WrappedInInferenceMode) {
  run_ranks(2, [](Rank& rank) {
    Stack ours;
    {
      const c10::InferenceMode guard;
      shard_stack(ours, sharded_on(rank));
    }
    Pair<Stack>{rank, ours, Stack()}.train(stack_loss, 2);
  });
}

} // namespace shardwise::test
