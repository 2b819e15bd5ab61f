// fully_shard(): several models in one program, and a model that is gone before its graph.
#include "ranks/fully_shard_models.h"

namespace shardwise::test {
namespace {

using torch::Tensor;

/// Two models that are trained one against the other.
struct Rivals {
  torch::nn::Sequential maker = mlp({3, 5, 4});
  torch::nn::Sequential judge = mlp({4, 6, 1});
};

} // namespace

TEST(FullyShardRoots, ABackwardComesToTwoRootsInAnotherOrderOnEachRank) {
  // T01, T34: which of two models that know nothing of each other comes first in backward.
  const auto backward = [](Rivals& rivals, int step, int r, double scale) {
    const auto make = [&] { return rivals.maker->forward(batch(step, r, 3)).pow(2).mean(); };
    const auto judge = [&] { return rivals.judge->forward(batch(step + 50, r, 4)).pow(2).mean(); };
    const bool make_first = (step + r) % 2 == 0;
    const auto first = make_first ? make() : judge();
    ((first + (make_first ? judge() : make())) * scale).backward();
  };
  on_ranks([&](Rank& rank) {
    Rivals ours, reference;
    replicate(ours.maker, on(rank));
    fully_shard(ours.judge, sharded_on(rank));
    auto makers = pair_of_copies(rank, ours.maker, reference.maker);
    auto judges = pair(rank, ours.judge, reference.judge);
    for (int step = 0; step < 4; ++step) {
      const auto text = c10::str("step ", step);
      backward(ours, step, rank.rank(), 1);
      for (int r = 0; r < rank.world_size(); ++r) backward(reference, step, r, 1.0 / rank.world_size());
      makers.check(text + ", maker");
      judges.check(text + ", judge");
      makers.optimize();
      judges.optimize();
    }
  });
}

TEST(FullyShardRoots, AGraphKeptAcrossTheOtherModelsStep) {
  // T34, T06: the judge learns between the maker's forward and its backward, and judges anew.
  on_ranks([](Rank& rank) {
    Rivals ours, reference;
    fully_shard(ours.maker, sharded_on(rank));
    fully_shard(ours.judge, sharded_on(rank).reshard_after_forward(false));
    const auto sgd = [](torch::nn::Sequential& model) { return torch::optim::SGD(model->parameters(), 0.3); };
    auto maker = sgd(ours.maker), judge = sgd(ours.judge);
    auto maker_reference = sgd(reference.maker), judge_reference = sgd(reference.judge);
    const int world = rank.world_size();
    for (int step = 0; step < 4; ++step) {
      const auto judge_alone = [&](Rivals& rivals, const Tensor& made, double scale) {
        (rivals.judge->forward(made.detach()).pow(2).mean() * scale).backward();
      };
      const auto judge_made = [&](Rivals& rivals, const Tensor& made, double scale) {
        (rivals.judge->forward(made).mean() * scale).backward();
      };
      for (auto* optimizer : {&maker, &judge, &maker_reference, &judge_reference}) optimizer->zero_grad();
      const auto made = ours.maker->forward(batch(step, rank.rank(), 3));
      std::vector<Tensor> made_reference;
      for (int r = 0; r < world; ++r) made_reference.push_back(reference.maker->forward(batch(step, r, 3)));
      judge_alone(ours, made, 1);
      for (const auto& each : made_reference) judge_alone(reference, each, 1.0 / world);
      judge.step();
      judge_reference.step();
      judge_made(ours, made, 1);
      for (const auto& each : made_reference) judge_made(reference, each, 1.0 / world);
      assert_pieces(*ours.maker, *reference.maker, rank, c10::str("step ", step, ", maker"));
      assert_pieces(*ours.judge, *reference.judge, rank, c10::str("step ", step, ", judge"));
      maker.step();
      maker_reference.step();
    }
  });
}

TEST(FullyShardRoots, AGraphOutlivesItsModel) {
  // T23: backward after the model is gone: the optimizer's shards get their gradients, and then everything goes.
  on_ranks([](Rank& rank) {
    c10::weak_intrusive_ptr<at::TensorImpl> leaf{c10::intrusive_ptr<at::TensorImpl>()};
    std::vector<Tensor> shards;
    Stack reference;
    {
      Tensor loss;
      {
        Stack ours;
        shard_stack(ours, sharded_on(rank));
        shards = ours->parameters();
        leaf = ours->block(1)->up->weight.getIntrusivePtr();
        loss = stack_loss(ours, 0, rank.rank());
      }
      ASSERT_FALSE(leaf.expired());
      loss.backward();
      reference_backward(rank, [&](int r) { return stack_loss(reference, 0, r); });
      const auto expected = reference->parameters();
      for (size_t i = 0; i < shards.size(); ++i) {
        assert_close(shards[i].grad(), piece_of(expected[i].grad(), rank), c10::str("gradient ", i));
      }
    }
    ASSERT_TRUE(leaf.expired());
    {
      const torch::NoGradGuard guard;
      for (auto& shard : shards) shard.add_(shard.grad());
    }
    stacks(rank, sharded_on(rank)).train(stack_loss, 3);
  });
}

} // namespace shardwise::test
