// replicate(): gradients are the mean over ranks. The same rows as test/python/ranks/test_replicate_gradients.py.
#include "ranks/fully_shard_models.h"

#include <random>

namespace shardwise::test {
namespace {

using Layers = torch::nn::Sequential;

auto loss_of(int64_t width, int64_t rows = 5) {
  return [=](Layers& model, int step, int r) { return model->forward(batch(step, r, width, rows)).pow(2).sum(); };
}

} // namespace

TEST(ReplicateGradients, ParityWithASingleProcess) {
  for (const int world : by_form<std::vector<int>>({2, 3}, {2, 3, 4})) {
    for (const auto& widths : {std::vector<int64_t>{4, 6, 2}, {3, 5, 7, 1}}) {
      run_ranks(world, [&](Rank& rank) { replicated_mlps(rank, widths).train(loss_of(widths[0]), by_form(4, 10)); });
    }
  }
}

TEST(ReplicateGradients, InnerUnits) {
  run_ranks(2, [](Rank& rank) {
    auto ours = mlp({4, 6, 5, 3});
    auto reference = mlp({4, 6, 5, 3});
    replicate(*ours->ptr(0), on(rank));
    replicate(*ours->ptr(2), on(rank));
    auto root = replicate(ours, on(rank));
    std::vector<std::string> names;
    for (const auto& unit : root.plan().units) {
      names.push_back(unit.name);
      ASSERT_EQ(unit.groups.at(0).parameters, 2);
    }
    ASSERT_EQ(names, (std::vector<std::string>{"0", "2", ""}));
    ASSERT_EQ(unit(*ours->ptr(2)).name(), "2");
    pair_of_copies(rank, ours, reference).train(loss_of(4), 3);
    ASSERT_EQ(root.counters().all_reduces, 3 * 3);
  });
}

TEST(ReplicateGradients, UnusedOnSomeRanks) {
  // T01-T03: each rank uses other branches, in another order; one branch is used nowhere in the last step.
  using Use = std::vector<std::string>;
  const std::vector<std::vector<Use>> uses{
      {Use{"left", "right"}, Use{"right", "left"}, Use{"right"}},
      {Use{"left"}, Use{"right"}, Use{}},
      {Use{"left"}, Use{"left"}, Use{"left"}}};
  for (const int world : {2, 3}) {
    run_ranks(world, [&](Rank& rank) {
      Branches ours;
      auto root = replicate(ours, on(rank));
      auto both = pair_of_copies(rank, ours, Branches());
      const auto loss = [&](Branches& model, int step, int r) {
        return model->forward(batch(step, r, 3), uses[step][r]).sum();
      };
      both.train(loss, 2);
      both.backward(loss, 2);
      both.check("the last step");
      ASSERT_FALSE(ours->right->weight.grad().defined());
      ASSERT_EQ(root.counters().all_reduces, 3);
    });
  }
}

TEST(ReplicateGradients, OrderOfArrivalDoesNotMatter) {
  // T01: units become ready in another order on each rank; without a canonical order sums of equal shapes mix.
  const std::vector<std::vector<std::string>> orders{{"left", "right"}, {"right", "left"}};
  run_ranks(2, [&](Rank& rank) {
    Branches ours;
    replicate(ours->left, on(rank));
    replicate(ours->right, on(rank));
    replicate(ours, on(rank));
    pair_of_copies(rank, ours, Branches())
        .train([&](Branches& model, int step, int r) { return model->forward(batch(step, r, 3), orders[r]).sum(); }, 3);
  });
}

TEST(ReplicateGradients, GradientAccumulation) {
  // R09, R15: three microbatches of unequal size a step, averaged at the last only; six steps.
  run_ranks(2, [](Rank& rank) {
    auto both = replicated_mlps(rank, {3, 5, 2});
    auto root = unit(both.ours);
    for (int step = 0; step < 6; ++step) {
      for (int part = 0; part < 3; ++part) {
        root.set_requires_gradient_sync(part == 2);
        both.backward(loss_of(3, 2 + part), 3 * step + part);
        if (part == 2) continue;
        for (const auto& parameter : both.ours->parameters()) ASSERT_FALSE(parameter.grad().defined());
      }
      both.finish(step);
    }
    ASSERT_EQ(root.counters().all_reduces, 6);
  });
}

TEST(ReplicateGradients, RandomFlags) {
  // R10, R16: the flag is set at random, before forward or between forward and backward.
  run_ranks(2, [](Rank& rank) {
    auto ours = mlp({3, 4, 2});
    auto reference = mlp({3, 4, 2});
    auto waiting = mlp({3, 4, 2});
    auto root = replicate(ours, on(rank));
    std::mt19937 choose(3);
    for (int step = 0; step < 50; ++step) {
      const bool sync = choose() % 2 == 0;
      const bool early = choose() % 2 == 0;
      if (choose() % 3 == 0) {
        ours->zero_grad();
        reference->zero_grad();
      }
      if (early) root.set_requires_gradient_sync(sync);
      auto loss = ours->forward(batch(step, rank.rank(), 3)).pow(2).sum();
      root.set_requires_gradient_sync(sync);
      loss.backward();
      reference_backward(rank, [&](int r) { return waiting->forward(batch(step, r, 3)).pow(2).sum(); });
      auto local = waiting->parameters();
      auto seen = reference->parameters();
      for (size_t i = 0; sync && i < local.size(); ++i) {
        auto& grad = seen[i].mutable_grad();
        grad = grad.defined() ? grad + local[i].grad() : local[i].grad();
        local[i].mutable_grad() = torch::Tensor();
      }
      assert_same(*ours, *reference, "step " + std::to_string(step));
    }
  });
}

TEST(ReplicateGradients, AddsToGradientsThatAreThere) {
  run_ranks(2, [](Rank& rank) {
    auto both = replicated_mlps(rank, {3, 4, 2});
    const auto step = [&](int number) {
      both.backward(loss_of(3), number);
      both.check("step " + std::to_string(number));
    };
    for (int number = 0; number < 4; ++number) step(number);
    for (const bool set_to_none : {false, true, false, false}) {
      both.each([&](Layers& model) { model->zero_grad(set_to_none); });
      step(9);
    }
    ASSERT_LE(unit(both.ours).counters().allocations, 2);
  });
}

TEST(ReplicateGradients, SharedParameters) {
  run_ranks(2, [](Rank& rank) {
    struct TiedImpl : torch::nn::Module {
      TiedImpl() {
        weight = register_parameter("weight", torch::zeros({4, 4}));
        again = register_parameter("again", weight);
        fill(*this);
      }
      torch::Tensor forward(const torch::Tensor& x) {
        return torch::tanh(x.matmul(weight)).matmul(again);
      }
      torch::Tensor weight, again;
    };
    using Tied = torch::nn::ModuleHolder<TiedImpl>;
    Tied ours(std::make_shared<TiedImpl>());
    auto root = replicate(ours, on(rank));
    pair_of_copies(rank, ours, Tied(std::make_shared<TiedImpl>())).train([](Tied& model, int step, int r) {
      return model->forward(batch(step, r, 4)).pow(2).sum();
    });
    ASSERT_EQ(root.plan().units.at(0).groups.at(0).parameters, 1);
  });
}

TEST(ReplicateGradients, FrozenThenUnfrozen) {
  run_ranks(2, [](Rank& rank) {
    auto both = pair_of_copies(rank, mlp({3, 4, 2}), mlp({3, 4, 2}));
    both.each([](Layers& model) { model->named_parameters()["0.weight"].requires_grad_(false); });
    replicate(both.ours, on(rank));
    for (int step = 0; step < 4; ++step) {
      both.each([&](Layers& model) {
        model->named_parameters()["0.weight"].requires_grad_(step >= 1);
        model->named_parameters()["2.bias"].requires_grad_(step < 3);
      });
      both.train(loss_of(3), 1, step);
    }
  });
}

TEST(ReplicateGradients, ToFloat64AfterWrapping) {
  run_ranks(2, [](Rank& rank) {
    auto both = replicated_mlps(rank, {3, 4, 2});
    for (int step = 0; step < 3; ++step) {
      const auto kind = step == 0 ? torch::kFloat32 : torch::kFloat64;
      both.each([&](Layers& model) {
        model->to(kind);
        model->zero_grad();
      });
      both.backward(
          [&](Layers& model, int number, int r) { return model->forward(batch(number, r, 3).to(kind)).pow(2).sum(); },
          step);
      both.check("step " + std::to_string(step));
      for (const auto& parameter : both.ours->parameters()) ASSERT_EQ(parameter.grad().scalar_type(), kind);
    }
  });
}

TEST(ReplicateGradients, MixedDtypes) {
  struct MixedImpl : torch::nn::Module {
    MixedImpl() {
      wide->to(torch::kFloat64);
      fill(*this);
    }
    torch::Tensor forward(const torch::Tensor& x) {
      return wide->forward(narrow->forward(x).to(torch::kFloat64));
    }
    torch::nn::Linear narrow = register_module("narrow", torch::nn::Linear(3, 2));
    torch::nn::Linear wide = register_module("wide", torch::nn::Linear(2, 2));
  };
  run_ranks(2, [](Rank& rank) {
    using Mixed = torch::nn::ModuleHolder<MixedImpl>;
    Mixed ours(std::make_shared<MixedImpl>());
    auto root = replicate(ours, on(rank));
    const auto groups = root.plan().units.at(0).groups;
    ASSERT_EQ(groups.size(), 2U);
    ASSERT_EQ(groups[0].dtype, "float32");
    ASSERT_EQ(groups[1].dtype, "float64");
    pair_of_copies(rank, ours, Mixed(std::make_shared<MixedImpl>())).train([](Mixed& model, int step, int r) {
      return model->forward(batch(step, r, 3)).sum();
    });
  });
}

TEST(ReplicateGradients, MadeIntoSomethingElse) {
  // Whoever has a gradient may change its shape, or give it other memory: the next one is what it would have been.
  const std::vector<std::function<void(torch::Tensor)>> changes{
      [](torch::Tensor gradient) { gradient.unsqueeze_(0); },
      [](torch::Tensor gradient) { gradient.dim() == 2 ? gradient.t_() : gradient; },
      [](torch::Tensor gradient) { gradient.resize_({0}); },
      [](torch::Tensor gradient) { gradient.set_(torch::zeros(99).storage(), 3, {2}, {1}); },
      [](torch::Tensor gradient) { gradient.requires_grad_(true); },
      [](torch::Tensor gradient) { gradient.fill_(7); }};
  run_ranks(2, [&](Rank& rank) {
    auto both = replicated_mlps(rank, {4, 6, 3});
    for (size_t step = 0; step <= changes.size(); ++step) {
      both.backward(loss_of(4), static_cast<int>(step));
      both.check("step " + std::to_string(step));
      if (step < changes.size()) {
        for (const auto& parameter : both.ours->parameters()) changes[step](parameter.grad());
      }
      both.each([](Layers& model) { model->zero_grad(); });
    }
  });
}

TEST(ReplicateGradients, MemoryFormatIsKept) {
  run_ranks(2, [](Rank& rank) {
    const auto convolution = [] {
      torch::nn::Conv2d layer(3, 4, 3);
      fill(*layer);
      torch::NoGradGuard guard;
      layer->weight.set_data(layer->weight.contiguous(torch::MemoryFormat::ChannelsLast));
      return layer;
    };
    auto ours = convolution();
    replicate(ours, on(rank));
    auto both = pair_of_copies(rank, ours, convolution());
    for (int step = 0; step < 3; ++step) {
      both.backward(
          [](torch::nn::Conv2d& model, int, int r) {
            return model->forward(torch::randn({2, 3, 5, 5}, generator(r))).sum();
          },
          step);
      both.check("step " + std::to_string(step));
      ASSERT_TRUE(ours->weight.grad().is_contiguous(torch::MemoryFormat::ChannelsLast));
    }
  });
}

} // namespace shardwise::test
