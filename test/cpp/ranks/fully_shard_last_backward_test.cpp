// Backwards that the program ends itself: their gradients may come with the next one.
#include "ranks/fully_shard_models.h"

namespace shardwise::test {

TEST(FullyShardLastBackward, GradientsAreThereAfterEach) {
  for (const int world : {1, 3}) {
    run_ranks(world, [](Rank& rank) {
      Stack ours;
      shard_stack(ours, sharded_on(rank)).set_is_last_backward(false);
      Pair<Stack>{rank, ours, Stack()}.train(stack_loss, 3);
    });
  }
}

TEST(FullyShardLastBackward, SyncThatIsSwitchedWithinABackward) {
  // It counts from the next backward on: ranks may differ in how far theirs is.
  run_ranks(2, [](Rank& rank) {
    Stack ours;
    auto root = shard_stack(ours, sharded_on(rank));
    Pair<Stack> both{rank, ours, Stack()};
    bool syncs = false;
    auto weight = ours->head->weight;
    weight.register_hook([&](const torch::Tensor& gradient) {
      root.set_requires_gradient_sync(!syncs);
      return gradient;
    });
    for (int step = 0; step < 6; ++step) {
      syncs = step % 2 == 1;
      root.set_requires_gradient_sync(syncs);
      both.backward(stack_loss, step);
      if (syncs) {
        both.check("step " + std::to_string(step));
        both.optimize();
      } else {
        for (const auto& parameter : ours->parameters()) ASSERT_FALSE(parameter.grad().defined());
      }
    }
  });
}

TEST(FullyShardLastBackward, TheNextBackwardPublishesWhatIsLeft) {
  run_ranks(2, [](Rank& rank) {
    Stack ours, reference;
    auto root = shard_stack(ours, sharded_on(rank)).set_manual_backward_finalization(true);
    stack_loss(ours, 0, rank.rank()).backward();
    for (const auto& parameter : ours->parameters()) ASSERT_FALSE(parameter.grad().defined());
    stack_loss(ours, 1, rank.rank()).backward();
    root.finalize_backward();
    for (const int step : {0, 1}) reference_backward(rank, [&](int r) { return stack_loss(reference, step, r); });
    assert_pieces(*ours, *reference, rank, "both");
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
      Stack ours, reference;
      auto root = shard_stack(ours, sharded_on(rank)).set_manual_backward_finalization(true);
      stack_loss(ours, 0, rank.rank()).backward();
      reference_backward(rank, [&](int r) { return stack_loss(reference, 0, r); });
      changes[i](ours);
      changes[i](reference);
      stack_loss(ours, 1, rank.rank()).backward();
      root.finalize_backward();
      reference_backward(rank, [&](int r) { return stack_loss(reference, 1, r); });
      assert_pieces(*ours, *reference, rank, c10::str("change ", i));
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
    Stack next;
    shard_stack(next, sharded_on(rank));
    Pair<Stack>{rank, next, Stack()}.train(stack_loss);
  });
}

} // namespace shardwise::test
