// fully_shard(): what programs ask of autograd. All results are those of plain LibTorch.
#include "ranks/fully_shard_models.h"

namespace shardwise::test {
namespace {

using torch::Tensor;

/// Blocks that are freed after forward, and a root that is too.
Pair<Stack> stacks(Rank& rank, std::optional<bool> reshard = true) {
  return stacks(rank, sharded_on(rank).reshard_after_forward(reshard));
}

} // namespace

TEST(FullyShardAutograd, PenaltiesOnGradients) {
  // A backward inside of a forward, and a backward of that: units come and go in both.
  const auto of_inputs = [](Stack& model, int step, int r) {
    const auto x = batch(step, r, 6).requires_grad_();
    auto y = x;
    for (size_t i = 0; i < 3; ++i) y = model->block(i)->forward(y, 0.5);
    const auto out = model->head(y).pow(2).mean();
    const auto gradient = torch::autograd::grad({out}, {x}, {}, true, /*create_graph=*/true)[0];
    // The embedding is the root's, and all ranks use it.
    return out + gradient.pow(2).sum() + model->embedding(tokens(step, r)).pow(2).mean();
  };
  // grad() for full members gives this rank's own gradient, with a graph.
  const auto of_members = [](Stack& model, int step, int r) {
    const auto loss = stack_loss(model, step, r);
    const auto gradients = torch::autograd::grad(
        {loss}, {model->head->weight, model->block(1)->up->weight, model->block(0)->norm->bias}, {}, true, true);
    auto penalty = torch::zeros({});
    for (const auto& gradient : gradients) penalty = penalty + gradient.pow(2).sum();
    return loss + 3 * penalty;
  };
  on_ranks([&](Rank& rank) {
    for (const bool reshard : {true, false}) stacks(rank, reshard).train(of_inputs);
    stacks(rank).train(of_members);
  });
}

TEST(FullyShardAutograd, BackwardForSomeMembers) {
  on_ranks([](Rank& rank) {
    auto both = stacks(rank);
    using Member = Tensor (*)(Stack&);
    const auto step = [&](const std::vector<Member>& chosen, int number) {
      const auto run = [&](Stack& model, int r, double scale) {
        std::vector<Tensor> inputs;
        for (const auto& choose : chosen) inputs.push_back(choose(model));
        (stack_loss(model, number, r) * scale).backward({}, false, false, inputs);
      };
      run(both.ours, rank.rank(), 1);
      for (int r = 0; r < rank.world_size(); ++r) run(both.reference, r, 1.0 / rank.world_size());
      both.finish(number);
    };
    const Member head = [](Stack& model) { return model->head->weight; };
    const Member inner = [](Stack& model) { return model->block(1)->down->bias; };
    const Member first = [](Stack& model) { return model->embedding->weight; };
    step({head}, 0);
    step({inner}, 1);
    step({inner, first}, 2);
    both.train(stack_loss, 2, 10);
    step({first, head, inner}, 20);
    both.train(stack_loss, 2, 30);
  });
}

TEST(FullyShardAutograd, UnusedByRankWithinAUnit) {
  // T01, T03: the block runs on all ranks, its parameters are used by some, and the accumulated sum of the others
  // waits.
  on_ranks([](Rank& rank) {
    auto both = stacks(rank);
    for (int step = 0; step < 4; ++step) {
      for (const bool sync : {false, true}) {
        unit(*both.ours).set_requires_gradient_sync(sync);
        both.backward(
            [&](Stack& model, int s, int r) {
              const bool up = (r + s + (sync ? 1 : 0)) % 2 == 0;
              auto x = model->embedding(tokens(s, r));
              x = up ? torch::tanh(model->block(0)->up(x).slice(-1, 0, 6)) : model->block(0)->norm(x);
              return model->head(x + model->block(1)->norm(x)).pow(2).mean();
            },
            10 * step + (sync ? 1 : 0));
      }
      both.finish(step);
    }
  });
}

namespace {

/// Fails in backward when its gradient comes to the output of block `at`.
Tensor failing_loss(Stack& model, int step, int rank, size_t at) {
  auto x = model->embedding(tokens(step, rank));
  for (size_t i = 0; i < 3; ++i) {
    x = model->block(i)->forward(x, 0.5);
    if (i == at) x.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("on purpose"); });
  }
  return model->head(x).pow(2).mean();
}

} // namespace

TEST(FullyShardAutograd, AFailedBackwardKeepsWhatWaited) {
  // T12: sums that wait for a backward with synchronisation survive one that fails, with it on or off, on its way to
  // any unit, when others were averaged or kept already; so do gradients in .grad.
  on_ranks([](Rank& rank) {
    for (const bool is_reset : {false, true}) {
      auto both = stacks(rank);
      auto root = unit(*both.ours);
      for (int step = 0; step < 6; ++step) {
        both.backward(stack_loss, 100 * step);
        root.set_requires_gradient_sync(false);
        both.backward(stack_loss, 100 * step + 1);
        root.set_requires_gradient_sync(step % 2 == 0);
        auto loss = failing_loss(both.ours, 100 * step + 2, rank.rank(), step % 3);
        EXPECT_ANY_THROW(loss.backward());
        if (is_reset) root.reset();
        root.set_requires_gradient_sync(true);
        both.backward(stack_loss, 100 * step + 3);
        both.finish(step);
      }
    }
  });
}

TEST(FullyShardAutograd, AdaptersOverAFrozenBase) {
  // T10, R34: backward goes through adapter B, adapter A, and touches the frozen weight last; then some of it thaws.
  struct Adapted : torch::nn::Module {
    Adapted() {
      fill(*this);
      set_trained(*base, false);
    }
    Tensor forward(const Tensor& x) {
      return torch::tanh(base(x) + b(a(x)));
    }
    torch::nn::Linear base = register_module("base", torch::nn::Linear(6, 6));
    torch::nn::Linear a = register_module("a", torch::nn::Linear(torch::nn::LinearOptions(6, 2).bias(false)));
    torch::nn::Linear b = register_module("b", torch::nn::Linear(torch::nn::LinearOptions(2, 6).bias(false)));
  };
  using Lora = torch::nn::Sequential;
  const auto make = [] {
    return Lora(std::make_shared<Adapted>(), std::make_shared<Adapted>(), std::make_shared<Adapted>());
  };
  on_ranks([&](Rank& rank) {
    for (const bool early : {true, false}) {
      auto ours = make();
      for (const auto& layer : ours->children()) fully_shard(*layer, sharded_on(rank));
      auto root = fully_shard(ours, sharded_on(rank).reshard_after_forward(true));
      root.set_unshard_in_backward(early);
      for (const auto& layer : ours->children()) unit(*layer).set_unshard_in_backward(early);
      auto both = pair(rank, ours, make());
      const auto loss = [](Lora& model, int step, int r) { return model->forward(batch(step, r, 6)).pow(2).sum(); };
      both.train(loss, 3);
      both.each([](Lora& model) { set_trained(*model->ptr(1), true); });
      both.train(loss, 3, 10);
      both.each([](Lora& model) {
        model->at<Adapted>(2).base->bias.set_requires_grad(true);
        set_trained(*model->ptr(0), false);
      });
      both.train(loss, 3, 20);
    }
  });
}

TEST(FullyShardAutograd, AnL2TermIsOverThisRanksShards) {
  // T15: its gradient needs no factor, with accumulation too; its value is a part of the whole.
  on_ranks([](Rank& rank) {
    auto both = stacks(rank);
    torch::optim::SGD mine(both.ours->parameters(), 0.1), theirs(both.reference->parameters(), 0.1);
    const auto penalty_of = [](Stack& model) {
      auto penalty = torch::zeros({});
      for (const auto& parameter : model->parameters()) penalty = penalty + parameter.pow(2).sum();
      return penalty;
    };
    for (int step = 0; step < 4; ++step) {
      for (const bool sync : {false, true}) {
        unit(*both.ours).set_requires_gradient_sync(sync);
        both.backward(
            [&](Stack& model, int s, int r) { return stack_loss(model, s, r) + 0.1 * penalty_of(model); },
            10 * step + (sync ? 1 : 0));
      }
      both.check(c10::str("step ", step));
      auto sum = penalty_of(both.ours).detach().reshape({1});
      std::vector<Tensor> sums{sum};
      rank.mesh().group("world")->allreduce(sums)->wait();
      assert_close(sum, penalty_of(both.reference).detach().reshape({1}), "the sum of the parts");
      mine.step();
      theirs.step();
      both.ours->zero_grad(/*set_to_none=*/step % 2 == 0);
      both.reference->zero_grad(step % 2 == 0);
    }
  });
}

} // namespace shardwise::test
