// AdamW, Adam and SGD: how they train wrapped models, what they keep, and what they refuse.
#include "optim/optimizer_state.h"
#include "ranks/optimizer_settings.h"
#include "support/expect.h"

#include <sstream>

namespace shardwise::test {
namespace {

using torch::optim::AdamWParamState;

Parameters some_parameters(torch::Dtype dtype = torch::kFloat) {
  Parameters parameters;
  for (const int64_t size : {3, 1, 7}) {
    parameters.push_back((torch::arange(2 * size).view({2, size}).to(dtype) / 10).requires_grad_());
  }
  return parameters;
}

Parameters copies_of(const Parameters& parameters) {
  Parameters copies;
  for (const auto& parameter : parameters) copies.push_back(parameter.detach().clone().requires_grad_());
  return copies;
}

/// Other gradients in each step.
void take_step(torch::optim::Optimizer& optimizer, int step) {
  int64_t number = 0;
  for (auto& group : optimizer.param_groups()) {
    for (auto& parameter : group.params()) {
      const auto seed = static_cast<uint64_t>(100 * step + number++);
      parameter.mutable_grad() = torch::randn(parameter.sizes(), generator(seed)).to(parameter.options());
    }
  }
  optimizer.step();
}

using Optimizers = std::vector<torch::optim::Optimizer*>;

void expect_identical(const Parameters& ours, const Parameters& theirs, const std::string& what) {
  for (size_t i = 0; i < ours.size(); ++i) {
    ASSERT_TRUE(torch::equal(ours[i], theirs[i])) << what << ", " << i << ours[i] << theirs[i];
  }
}

void expect_close(const Parameters& ours, const Parameters& theirs, const std::string& what) {
  for (size_t i = 0; i < ours.size(); ++i) assert_close(ours[i], theirs[i], c10::str(what, ", ", i));
}

template <typename From, typename To>
void pass_on(const From& from, To& to) {
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
}

template <typename Ours, typename Theirs, typename Options>
void check_archives(const Options& options) {
  Ours first(some_parameters(), options);
  for (int step = 0; step < 3; ++step) take_step(first, step);
  const auto parameters = copies_of(first.param_groups()[0].params());
  const auto others = copies_of(parameters);
  Ours second(parameters, Options(0.5));
  // Something is kept already, which the archive's takes the place of.
  take_step(second, 7);
  Theirs theirs(others, Options(0.5));
  pass_on(first, second);
  pass_on(first, theirs);
  {
    const torch::NoGradGuard guard;
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].copy_(others[i]);
  }
  for (int step = 3; step < 6; ++step) {
    for (auto* one : Optimizers{&first, &second, &theirs}) take_step(*one, step);
    expect_identical(parameters, first.param_groups()[0].params(), "ours again");
    expect_close(others, first.param_groups()[0].params(), "torch's own");
  }
  // And back: what torch's own has kept.
  const auto last = copies_of(others);
  Ours third(last, options);
  pass_on(theirs, third);
  for (int step = 6; step < 9; ++step) {
    take_step(theirs, step);
    take_step(third, step);
    expect_close(last, others, "from torch's own");
  }
}

AdamWParamState& state_of(torch::optim::Optimizer& optimizer, const torch::Tensor& parameter) {
  return static_cast<AdamWParamState&>(*optimizer.state()[parameter.unsafeGetTensorImpl()]);
}

} // namespace

TEST(OptimizerLife, Archives) {
  check_archives<AdamW, torch::optim::AdamW>(torch::optim::AdamWOptions(0.02).amsgrad(true));
  check_archives<Adam, torch::optim::Adam>(torch::optim::AdamOptions(0.02));
  check_archives<SGD, torch::optim::SGD>(torch::optim::SGDOptions(0.02).momentum(0.9).dampening(0.2));
}

TEST(OptimizerLife, TheNumberOfStepsIsTheProgramsToo) {
  // Whoever sets it is heard, whether in the state that is there or by another object.
  const auto parameters = some_parameters();
  const auto others = copies_of(parameters);
  AdamW mine(parameters, torch::optim::AdamWOptions(0.02));
  torch::optim::AdamW theirs(others, torch::optim::AdamWOptions(0.02));
  const Optimizers both{&mine, &theirs};
  const auto steps = [&](int first) {
    for (int step = first; step < first + 2; ++step) {
      for (auto* one : both) take_step(*one, step);
      expect_close(parameters, others, c10::str("step ", step));
    }
  };
  steps(0);
  ASSERT_EQ(state_of(mine, parameters[1]).step(), 2);
  for (auto* one : both) state_of(*one, one->param_groups()[0].params()[1]).step(1);
  steps(2);
  ASSERT_EQ(state_of(mine, parameters[0]).step(), 4);
  ASSERT_EQ(state_of(mine, parameters[1]).step(), 3);
  for (auto* one : both) {
    const auto& parameter = one->param_groups()[0].params()[0];
    auto made = std::make_unique<AdamWParamState>();
    made->step(4);
    made->exp_avg(torch::full_like(parameter, 0.1));
    made->exp_avg_sq(torch::full_like(parameter, 0.3));
    one->state()[parameter.unsafeGetTensorImpl()] = std::move(made);
    one->state().erase(one->param_groups()[0].params()[2].unsafeGetTensorImpl());
  }
  steps(4);
  ASSERT_EQ(state_of(mine, parameters[0]).step(), 6);
  ASSERT_EQ(state_of(mine, parameters[2]).step(), 2);
}

TEST(OptimizerLife, ClonesCountByThemselves) {
  const auto parameters = some_parameters();
  AdamW first(parameters, torch::optim::AdamWOptions(0.02));
  take_step(first, 0);
  const auto copies = copies_of(parameters);
  const auto others = copies_of(parameters);
  AdamW second(copies, torch::optim::AdamWOptions(0.02));
  torch::optim::AdamW theirs(others, torch::optim::AdamWOptions(0.02));
  for (size_t i = 0; i < copies.size(); ++i) {
    const auto& kept = first.state()[parameters[i].unsafeGetTensorImpl()];
    for (auto [optimizer, parameter] :
         {std::pair<torch::optim::Optimizer*, torch::Tensor>(&second, copies[i]), {&theirs, others[i]}}) {
      auto clone = kept->clone();
      // As torch's, it shares these.
      auto& state = static_cast<AdamWParamState&>(*clone);
      state.exp_avg(state.exp_avg().clone());
      state.exp_avg_sq(state.exp_avg_sq().clone());
      optimizer->state()[parameter.unsafeGetTensorImpl()] = std::move(clone);
    }
  }
  for (int step = 1; step < 4; ++step) {
    for (auto* one : Optimizers{&first, &second, &theirs}) take_step(*one, step);
    expect_identical(copies, parameters, c10::str("step ", step));
    expect_close(copies, others, c10::str("step ", step));
  }
}

TEST(OptimizerLife, WhatIsKeptFollowsItsParameter) {
  on_worlds([](Rank& rank) {
    for (const auto& optimizers : {optimizer_pairs().front(), optimizer_pairs().back()}) {
      Beside both(rank, optimizers, [&](Stack& model) { shard_stack(model, sharded_on(rank)); });
      auto& reference = both.reference;
      for (int step = 0; step < 6; ++step) {
        if (step == 3) {
          // Torch's own keep what they have in the old dtype: another one takes its place.
          both.ours->to(torch::kDouble);
          const optim::OptimizerState from(*both.theirs);
          std::vector<optim::ParameterState> kept;
          for (const auto& parameter : reference->parameters()) kept.push_back(from.get(parameter));
          reference->to(torch::kDouble);
          optim::OptimizerState to(*both.theirs);
          for (size_t i = 0; i < kept.size(); ++i) to.set(reference->parameters()[i], kept[i]);
        }
        both.train(step, 1);
        assert_state(full_state_dict(both.ours), plain_state(*reference), c10::str(optimizers.name, ", step ", step));
      }
      for (const auto& item : optim::OptimizerState(*both.mine).get(both.ours->parameters()[0]).tensors) {
        ASSERT_EQ(item.value().scalar_type(), torch::kDouble) << item.key();
      }
    }
  });
}

TEST(OptimizerLife, GradientsThatLieOtherwiseInMemory) {
  const auto parameter = torch::arange(12.0).view({3, 4}).requires_grad_();
  const auto other = parameter.detach().clone().requires_grad_();
  const auto turned = parameter.detach().clone().t().contiguous().t().requires_grad_();
  AdamW mine({parameter, turned}, torch::optim::AdamWOptions(0.02));
  torch::optim::AdamW theirs({other}, torch::optim::AdamWOptions(0.02));
  for (int step = 0; step < 3; ++step) {
    const auto gradient = torch::randn({3, 4}, generator(static_cast<uint64_t>(step)));
    parameter.mutable_grad() = gradient.t().contiguous().t();
    turned.mutable_grad() = gradient.clone();
    other.mutable_grad() = gradient.clone();
    mine.step();
    theirs.step();
    assert_close(parameter, other, c10::str("step ", step));
    assert_close(turned, other, c10::str("turned, step ", step));
  }
}

TEST(OptimizerLife, AClosureComputesWithGradients) {
  const auto parameter = torch::ones({3}).requires_grad_();
  const auto other = torch::ones({3}).requires_grad_();
  AdamW mine({parameter}, torch::optim::AdamWOptions(0.1));
  torch::optim::AdamW theirs({other}, torch::optim::AdamWOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    const auto run = [](torch::optim::Optimizer& optimizer, const torch::Tensor& tensor) {
      const torch::NoGradGuard outside;
      return optimizer.step([&] {
        optimizer.zero_grad();
        auto loss = (tensor * tensor).sum();
        loss.backward();
        return loss;
      });
    };
    ASSERT_EQ(run(mine, parameter).item<float>(), run(theirs, other).item<float>());
    assert_close(parameter, other, c10::str("step ", step));
  }
}

TEST(OptimizerLife, AParameterThatIsListedTwiceIsChangedOnce) {
  const auto parameter = torch::ones({3}).requires_grad_();
  const auto other = torch::ones({3}).requires_grad_();
  AdamW mine({parameter, parameter}, torch::optim::AdamWOptions(0.1));
  torch::optim::AdamW theirs({other}, torch::optim::AdamWOptions(0.1));
  for (int step = 0; step < 3; ++step) {
    parameter.mutable_grad() = torch::full({3}, 0.5 + step);
    other.mutable_grad() = torch::full({3}, 0.5 + step);
    mine.step();
    theirs.step();
    assert_close(parameter, other, c10::str("step ", step));
  }
  ASSERT_EQ(state_of(mine, parameter).step(), 3);
}

TEST(OptimizerLife, WhatNoOperationTakesIsAnError) {
  const auto good = torch::ones({2}).requires_grad_();
  good.mutable_grad() = torch::ones({2});
  const auto refused = [&](const torch::Tensor& parameter, const torch::Tensor& gradient, const std::string& part) {
    parameter.mutable_grad() = gradient;
    AdamW adam({good, parameter}, torch::optim::AdamWOptions(0.1));
    expect_error<ValueError>([&] { adam.step(); }, {"parameter 1 of group 0 of this AdamW", part, "no step was made"});
    SGD sgd({good, parameter}, torch::optim::SGDOptions(0.1).momentum(0.9));
    expect_error<ValueError>([&] { sgd.step(); }, {"parameter 1 of group 0 of this SGD", part});
    ASSERT_TRUE(torch::equal(good, torch::ones({2}))) << "nothing was changed";
  };
  const auto parameter = torch::ones({4, 2}).requires_grad_();
  refused(parameter, torch::ones({4, 2}).to_sparse(), "or its gradient is sparse");
  refused(parameter, torch::ones({4, 2}, torch::kDouble), "is float32, but its gradient is float64");
  refused(parameter, torch::ones({8}), "has sizes [4, 2], but its gradient has [8]");
  refused(parameter, torch::ones({4, 2}, torch::kMeta), "is on cpu, but its gradient on meta");
  const auto complex = torch::ones({2}, torch::kComplexFloat).requires_grad_();
  refused(
      complex, torch::ones({2}, torch::kComplexFloat), "is complex64, but it must be half, bfloat16, float or double");
  const auto gaps = torch::ones({4, 4}).slice(1, 0, 2).detach().requires_grad_();
  refused(gaps, torch::ones({4, 2}), "has gaps or overlaps in its memory");
}

TEST(OptimizerLife, StateThatDoesNotFitIsAnError) {
  on_worlds([](Rank& rank) {
    Stack model;
    shard_stack(model, sharded_on(rank));
    AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02));
    stack_loss(model, 0, rank.rank()).backward();
    const auto parameter = model->parameters()[0];
    auto whole = std::make_unique<AdamWParamState>();
    whole->exp_avg(torch::zeros({11, 6}));
    whole->exp_avg_sq(torch::zeros({11, 6}));
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(whole);
    expect_error<Error>(
        [&] { optimizer.step(); },
        {c10::str("the state of parameter 0 of group 0 ('embedding.weight' on rank ", rank.rank(), ") of this AdamW"),
         "has sizes [11, 6]", "does not fit shards"});
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::make_unique<torch::optim::SGDParamState>();
    expect_error<Error>([&] { optimizer.step(); }, {"is not of torch::optim's class AdamWParamState"});
    assert_state(full_state_dict(model), plain_state(*Stack()), "nothing was changed");
  });
}

TEST(FusedOptimizers, ParametersWithoutAGradientAreLeftAlone) {
  // Their steps are not counted, so that each has its own number of them.
  on_worlds([](Rank& rank) {
    for (const auto& optimizers : optimizer_pairs()) {
      Beside<Branches> both(rank, optimizers, [&](Branches& model) { fully_shard(model, sharded_on(rank)); });
      const std::vector<std::vector<std::string>> uses{{"left"}, {"left"}, {"right"}, {"left", "right"}, {"right"}};
      for (size_t i = 0; i < uses.size(); ++i) {
        const auto loss = [&](Branches& model, int step, int r) {
          return model->forward(batch(step, r, 3), uses[i]).pow(2).sum();
        };
        both.step(loss, static_cast<int>(i));
        assert_state(full_state_dict(both.ours), plain_state(*both.reference), c10::str(optimizers.name, ", step ", i));
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
    for (auto* optimizer : Optimizers{&adam, &sgd}) {
      expect_error<Error>(
          [&] { optimizer->step(); }, {c10::str("rank ", rank.rank(), ":"), "make it after fully_shard()"});
    }
  });
}

} // namespace shardwise::test
