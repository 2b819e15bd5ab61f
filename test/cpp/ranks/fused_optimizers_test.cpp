// AdamW, Adam and SGD on wrapped models: they train as torch's own do in one process.
#include "ranks/optimizer_settings.h"

#include "support/expect.h"

namespace shardwise::test {
namespace {

/// Both have the same values after each step.
void train_alike(Beside& both, const std::string& what, int steps = 4) {
  for (int step = 0; step < steps; ++step) {
    both.train(step, 1);
    assert_state(full_state_dict(both.ours), plain_state(*both.reference), c10::str(what, ", step ", step));
  }
}

torch::Tensor branches_loss(Branches& model, int step, int rank, const std::vector<std::string>& use) {
  return model->forward(batch(step, rank, 3), use).pow(2).sum();
}

} // namespace

TEST(FusedOptimizers, TrainAsTorchsDoInOneProcess) {
  on_worlds([](Rank& rank) {
    for (const auto& optimizers : optimizer_pairs()) {
      const bool takes_all = is_long_form() || optimizers.name == "AdamW" || optimizers.name == "SGD, Nesterov";
      for (const auto& [name, wrap] : stack_wrappings()) {
        if (!takes_all && name != "rows") continue;
        const auto what = optimizers.name + ", " + name;
        rank.step(what);
        Beside both(rank, optimizers, [&](Stack& model) { wrap(model, rank); });
        train_alike(both, what);
      }
    }
  });
}

TEST(FusedOptimizers, ParametersWithoutAGradientAreLeftAlone) {
  // Their steps are not counted, so that each has its own number of them.
  on_worlds([](Rank& rank) {
    for (const auto& optimizers : optimizer_pairs()) {
      Branches ours, reference;
      fully_shard(ours, sharded_on(rank));
      const auto mine = optimizers.ours(ours->parameters());
      const auto theirs = optimizers.theirs(reference->parameters());
      const std::vector<std::vector<std::string>> uses{{"left"}, {"left"}, {"right"}, {"left", "right"}, {"right"}};
      for (size_t i = 0; i < uses.size(); ++i) {
        const auto step = static_cast<int>(i);
        mine->zero_grad();
        theirs->zero_grad();
        branches_loss(ours, step, rank.rank(), uses[i]).backward();
        reference_backward(rank, [&](int r) { return branches_loss(reference, step, r, uses[i]); });
        mine->step();
        theirs->step();
        assert_state(full_state_dict(ours), plain_state(*reference), c10::str(optimizers.name, ", step ", step));
      }
    }
  });
}

TEST(FusedOptimizers, GroupsOfTheirOwnAndOneThatComesLater) {
  on_worlds([](Rank& rank) {
    Stack ours, reference;
    shard_stack(ours, sharded_on(rank));
    const auto make = [](Stack& model, auto make_optimizer) {
      std::vector<torch::optim::OptimizerParamGroup> groups;
      groups.emplace_back(model->blocks->parameters());
      groups.emplace_back(
          model->head->parameters(), std::make_unique<torch::optim::AdamWOptions>(
                                         torch::optim::AdamWOptions(0.05).betas({0.7, 0.8}).amsgrad(true)));
      return make_optimizer(groups);
    };
    const torch::optim::AdamWOptions defaults(0.02);
    auto mine = make(ours, [&](const auto& groups) { return AdamW(groups, defaults); });
    auto theirs = make(reference, [&](const auto& groups) { return torch::optim::AdamW(groups, defaults); });
    torch::optim::StepLR my_rate(mine, 2, 0.5);
    torch::optim::StepLR their_rate(theirs, 2, 0.5);
    for (int step = 0; step < 6; ++step) {
      ours->zero_grad();
      reference->zero_grad();
      stack_loss(ours, step, rank.rank()).backward();
      reference_backward(rank, [&](int r) { return stack_loss(reference, step, r); });
      if (step == 3) {
        mine.add_param_group({ours->embedding->parameters()});
        theirs.add_param_group({reference->embedding->parameters()});
      }
      mine.step();
      theirs.step();
      my_rate.step();
      their_rate.step();
      assert_state(full_state_dict(ours), plain_state(*reference), c10::str("step ", step));
    }
  });
}

TEST(FusedOptimizers, MadeBeforeWrappingIsAnError) {
  on_worlds([](Rank& rank) {
    Stack model;
    AdamW adam(model->parameters(), torch::optim::AdamWOptions(0.02));
    SGD sgd(model->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
    shard_stack(model, sharded_on(rank));
    stack_loss(model, 0, rank.rank()).backward();
    for (torch::optim::Optimizer* optimizer :
         {static_cast<torch::optim::Optimizer*>(&adam), static_cast<torch::optim::Optimizer*>(&sgd)}) {
      expect_error<Error>(
          [&] { optimizer->step(); }, {c10::str("rank ", rank.rank(), ":"), "make it after fully_shard()"});
    }
  });
}

} // namespace shardwise::test
