// Backwards that the program ends itself, and iterations that it gives up.
#include "ranks/fully_shard_models.h"

namespace shardwise::test {

TEST(FullyShardLastBackward, GradientsAreThereAfterEach) {
  for (const int world : {1, 3}) {
    run_ranks(world, [](Rank& rank) {
      auto both = stacks(rank, sharded_on(rank));
      unit(*both.ours).set_is_last_backward(false);
      both.train(stack_loss, 3);
    });
  }
}

TEST(FullyShardLastBackward, SyncThatIsSwitchedWithinABackward) {
  // It counts from the next backward on: ranks may differ in how far theirs is.
  run_ranks(2, [](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank));
    auto root = unit(*both.ours);
    bool syncs = false;
    auto weight = both.ours->head->weight;
    weight.register_hook([&](const torch::Tensor& gradient) {
      root.set_requires_gradient_sync(!syncs);
      return gradient;
    });
    for (int step = 0; step < 6; ++step) {
      syncs = step % 2 == 1;
      root.set_requires_gradient_sync(syncs);
      both.backward(stack_loss, step);
      if (syncs) {
        both.finish(step);
      } else {
        for (const auto& parameter : both.ours->parameters()) ASSERT_FALSE(parameter.grad().defined());
      }
    }
  });
}

TEST(FullyShardLastBackward, TheNextBackwardPublishesWhatIsLeft) {
  run_ranks(2, [](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank));
    auto root = unit(*both.ours).set_manual_backward_finalization(true);
    both.backward(stack_loss, 0);
    for (const auto& parameter : both.ours->parameters()) ASSERT_FALSE(parameter.grad().defined());
    both.backward(stack_loss, 1);
    root.finalize_backward();
    both.check("both");
  });
}

TEST(FullyShardLastBackward, ChangesOfParametersLoseNothingOfTheBackwardBefore) {
  const std::vector<std::function<void(Stack&)>> changes{
      [](Stack& model) { model->embedding->parameters()[0].set_requires_grad(false); },
      [](Stack& model) {
        model->to(torch::kDouble);
        for (auto& parameter : model->parameters()) {
          if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad().to(torch::kDouble);
        }
      }};
  for (size_t i = 0; i < changes.size(); ++i) {
    run_ranks(2, [&](Rank& rank) {
      auto both = stacks(rank, sharded_on(rank));
      auto root = unit(*both.ours).set_manual_backward_finalization(true);
      both.backward(stack_loss, 0);
      both.each(changes[i]);
      both.backward(stack_loss, 1);
      root.finalize_backward();
      both.check(c10::str("change ", i));
    });
  }
}

TEST(FullyShardLastBackward, ADeletedModelIsFreed) {
  // T23: while its gradients wait to be published, and its last sum may be under way.
  run_ranks(2, [](Rank& rank) {
    c10::weak_intrusive_ptr<c10::StorageImpl> shards{c10::intrusive_ptr<c10::StorageImpl>()};
    c10::weak_intrusive_ptr<at::TensorImpl> leaf{c10::intrusive_ptr<at::TensorImpl>()};
    {
      Stack ours;
      shard_stack(ours, sharded_on(rank)).set_manual_backward_finalization(true);
      stack_loss(ours, 0, rank.rank()).backward();
      shards = ours->block(1)->parameters()[0].storage().getWeakStorageImpl();
      leaf = ours->block(1)->up->weight.getIntrusivePtr();
      ASSERT_FALSE(shards.expired());
    }
    ASSERT_TRUE(leaf.expired());
    ASSERT_TRUE(shards.expired());
    stacks(rank, sharded_on(rank)).train(stack_loss);
  });
}

TEST(FullyShardFinalize, WrongCallsAreErrors) {
  run_ranks(2, [](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank));
    auto& ours = both.ours;
    auto root = unit(*ours);
    expect_error<Error>([&] { root.finalize_backward(); }, {"requires manual backward finalization"});
    root.set_manual_backward_finalization(true).set_requires_gradient_sync(false);
    stack_loss(ours, 0, rank.rank()).backward();
    root.set_requires_gradient_sync(true);
    expect_error<Error>(
        [&] { root.set_manual_backward_finalization(false); }, {"cannot change mode after backward starts"});
    auto reduction = root.finalize_backward(/*async=*/true);
    expect_error<Error>([&] { root.finalize_backward(); }, {"must be waited on before"});
    root.reset_iter_state();
    expect_error<Error>([&] { reduction.wait(); }, {"was invalidated"});
    reduction.wait();
    for (const auto& parameter : ours->parameters()) ASSERT_FALSE(parameter.grad().defined());
    root.set_manual_backward_finalization(false);
    both.train(stack_loss);
  });
}

TEST(FullyShard1DTrainingCompose, ResetIterStateAfterException) {
  // In forward, and in backward; with gradients of before that wait for a sum.
  for (const bool in_backward : {false, true}) {
    run_ranks(2, [&](Rank& rank) {
      auto both = stacks(rank, sharded_on(rank));
      auto& ours = both.ours;
      auto root = unit(*ours);
      both.train(stack_loss, 1);
      root.set_requires_gradient_sync(false);
      stack_loss(ours, 1, rank.rank()).backward();
      root.set_requires_gradient_sync(true);
      root.set_manual_backward_finalization(true);
      stack_loss(ours, 2, rank.rank()).backward();
      root.set_requires_gradient_sync(false);
      const auto fail = [&] {
        auto loss = stack_loss(ours, 3, rank.rank());
        if (!in_backward) throw std::runtime_error("in forward");
        auto weight = ours->embedding->weight;
        const auto handle = weight.register_hook([](const torch::Tensor& g) -> torch::Tensor {
          if (g.defined()) throw std::runtime_error("in backward");
          return g;
        });
        try {
          loss.backward();
        } catch (...) {
          weight.remove_hook(handle);
          throw;
        }
      };
      EXPECT_THROW(fail(), std::runtime_error);
      root.reset_iter_state();
      for (auto& parameter : ours->parameters()) parameter.mutable_grad() = torch::Tensor();
      root.set_requires_gradient_sync(true).set_manual_backward_finalization(false);
      both.train(stack_loss, 3, 4);
    });
  }
}

TEST(FullyShardFinalize, UnusedParametersGetZeros) {
  // Nobody uses "right"; "left" is used by rank 0 alone.
  const auto loss = [](Branches& model, int step, int rank) {
    const auto use = rank == 0 ? std::vector<std::string>{"left"} : std::vector<std::string>{};
    return model->forward(batch(step, rank, 3), use).square().mean();
  };
  for (const int world : {1, 3}) {
    for (const bool replicated : {false, true}) {
      run_ranks(world, [&](Rank& rank) {
        Branches ours;
        auto unit = replicated ? replicate(ours, on(rank)) : fully_shard(ours, sharded_on(rank));
        auto both = pair(rank, ours, Branches());
        both.shards = replicated ? 1 : world;
        for (int step = 0; step < 6; ++step) {
          const bool zeros = step < 3;
          unit.set_reduce_scatter_unused_params(zeros);
          both.backward(loss, step);
          for (auto& parameter : both.reference->parameters()) {
            if (zeros && !parameter.grad().defined()) parameter.mutable_grad() = torch::zeros_like(parameter);
          }
          both.finish(step);
        }
      });
    }
  }
}

} // namespace shardwise::test
