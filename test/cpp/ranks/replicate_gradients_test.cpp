// replicate(): gradients are the mean over ranks. The same rows as test/python/ranks/test_replicate_gradients.py.
#include "ranks/mlp_parity.h"

#include <random>

namespace shardwise::test {
namespace {

void parity(Rank& rank, const std::vector<int64_t>& widths) {
  train_mlp(
      rank, widths, [&](Layers& ours) { replicate(ours, on(rank)); },
      [](const Layers& ours, const Layers& reference, const std::string& what) {
        assert_same(*ours, *reference, what);
      });
}

} // namespace

TEST(ReplicateGradients, ParityWithASingleProcess) {
  for (const int world : by_form<std::vector<int>>({2, 3}, {2, 3, 4})) {
    run_ranks(world, [](Rank& rank) { parity(rank, {4, 6, 2}); });
    run_ranks(world, [](Rank& rank) { parity(rank, {3, 5, 7, 1}); });
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
    for (int step = 0; step < 3; ++step) {
      ours->forward(batch(step, rank.rank(), 4)).sum().backward();
      reference_backward(rank, [&](int r) { return reference->forward(batch(step, r, 4)).sum(); });
      assert_same(*ours, *reference, "step " + std::to_string(step));
    }
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
      Branches reference;
      auto root = replicate(ours, on(rank));
      torch::optim::AdamW mine(ours->parameters(), torch::optim::AdamWOptions(0.05));
      torch::optim::AdamW theirs(reference->parameters(), torch::optim::AdamWOptions(0.05));
      for (size_t step = 0; step < uses.size(); ++step) {
        mine.zero_grad();
        theirs.zero_grad();
        ours->forward(batch(step, rank.rank(), 3), uses[step][rank.rank()]).sum().backward();
        reference_backward(rank, [&](int r) { return reference->forward(batch(step, r, 3), uses[step][r]).sum(); });
        assert_same(*ours, *reference, "step " + std::to_string(step));
        mine.step();
        theirs.step();
        assert_same(*ours, *reference, "after the optimizer, step " + std::to_string(step));
      }
      ASSERT_FALSE(ours->right->weight.grad().defined());
      ASSERT_EQ(root.counters().all_reduces, 3);
    });
  }
}

TEST(ReplicateGradients, OrderOfArrivalDoesNotMatter) {
  // T01: units become ready in another order on each rank; without a canonical order sums of equal shapes mix.
  const std::vector<std::vector<std::string>> orders{
      std::vector<std::string>{"left", "right"}, std::vector<std::string>{"right", "left"}};
  run_ranks(2, [&](Rank& rank) {
    Branches ours;
    Branches reference;
    replicate(ours->left, on(rank));
    replicate(ours->right, on(rank));
    replicate(ours, on(rank));
    for (int step = 0; step < 3; ++step) {
      ours->forward(batch(step, rank.rank(), 3), orders[rank.rank()]).sum().backward();
      reference_backward(rank, [&](int r) { return reference->forward(batch(step, r, 3), orders[r]).sum(); });
      assert_same(*ours, *reference, "step " + std::to_string(step));
    }
  });
}

TEST(ReplicateGradients, GradientAccumulation) {
  // R09, R15: three microbatches of unequal size a step, averaged at the last only; six steps.
  run_ranks(2, [](Rank& rank) {
    auto ours = mlp({3, 5, 2});
    auto reference = mlp({3, 5, 2});
    auto root = replicate(ours, on(rank));
    torch::optim::Adam mine(ours->parameters(), 0.05);
    torch::optim::Adam theirs(reference->parameters(), 0.05);
    for (int step = 0; step < 6; ++step) {
      mine.zero_grad();
      theirs.zero_grad();
      for (int part = 0; part < 3; ++part) {
        root.set_requires_gradient_sync(part == 2);
        const int number = 3 * step + part;
        ours->forward(batch(number, rank.rank(), 3, 2 + part)).pow(2).sum().backward();
        reference_backward(rank, [&](int r) { return reference->forward(batch(number, r, 3, 2 + part)).pow(2).sum(); });
        if (part == 2) continue;
        for (const auto& parameter : ours->parameters()) ASSERT_FALSE(parameter.grad().defined());
      }
      assert_same(*ours, *reference, "step " + std::to_string(step));
      mine.step();
      theirs.step();
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
    auto ours = mlp({3, 4, 2});
    auto reference = mlp({3, 4, 2});
    auto root = replicate(ours, on(rank));
    const auto step = [&](int number) {
      ours->forward(batch(number, rank.rank(), 3)).pow(2).sum().backward();
      reference_backward(rank, [&](int r) { return reference->forward(batch(number, r, 3)).pow(2).sum(); });
      assert_same(*ours, *reference, "step " + std::to_string(number));
    };
    for (int number = 0; number < 4; ++number) step(number);
    for (const bool set_to_none : {false, true, false, false}) {
      ours->zero_grad(set_to_none);
      reference->zero_grad(set_to_none);
      step(9);
    }
    ASSERT_LE(root.counters().allocations, 2);
  });
}

TEST(ReplicateGradients, SharedParameters) {
  run_ranks(2, [](Rank& rank) {
    struct Tied : torch::nn::Module {
      Tied() {
        weight = register_parameter("weight", torch::zeros({4, 4}));
        again = register_parameter("again", weight);
        fill(*this);
      }
      torch::Tensor forward(const torch::Tensor& x) {
        return torch::tanh(x.matmul(weight)).matmul(again);
      }
      torch::Tensor weight, again;
    };
    Tied ours;
    Tied reference;
    auto root = replicate(ours, on(rank));
    for (int step = 0; step < 3; ++step) {
      ours.forward(batch(step, rank.rank(), 4)).pow(2).sum().backward();
      reference_backward(rank, [&](int r) { return reference.forward(batch(step, r, 4)).pow(2).sum(); });
      assert_same(ours, reference, "step " + std::to_string(step));
    }
    ASSERT_EQ(root.plan().units.at(0).groups.at(0).parameters, 1);
  });
}

TEST(ReplicateGradients, FrozenThenUnfrozen) {
  run_ranks(2, [](Rank& rank) {
    auto ours = mlp({3, 4, 2});
    auto reference = mlp({3, 4, 2});
    for (auto model : {ours, reference}) model->named_parameters()["0.weight"].requires_grad_(false);
    replicate(ours, on(rank));
    for (int step = 0; step < 4; ++step) {
      for (auto model : {ours, reference}) {
        model->zero_grad();
        model->named_parameters()["0.weight"].requires_grad_(step >= 1);
        model->named_parameters()["2.bias"].requires_grad_(step < 3);
      }
      ours->forward(batch(step, rank.rank(), 3)).sum().backward();
      reference_backward(rank, [&](int r) { return reference->forward(batch(step, r, 3)).sum(); });
      assert_same(*ours, *reference, "step " + std::to_string(step));
    }
  });
}

TEST(ReplicateGradients, ToFloat64AfterWrapping) {
  run_ranks(2, [](Rank& rank) {
    auto ours = mlp({3, 4, 2});
    auto reference = mlp({3, 4, 2});
    replicate(ours, on(rank));
    for (int step = 0; step < 3; ++step) {
      if (step == 1) {
        ours->to(torch::kFloat64);
        reference->to(torch::kFloat64);
      }
      const auto kind = step == 0 ? torch::kFloat32 : torch::kFloat64;
      ours->zero_grad();
      reference->zero_grad();
      ours->forward(batch(step, rank.rank(), 3).to(kind)).pow(2).sum().backward();
      reference_backward(rank, [&](int r) { return reference->forward(batch(step, r, 3).to(kind)).pow(2).sum(); });
      assert_same(*ours, *reference, "step " + std::to_string(step));
      for (const auto& parameter : ours->parameters()) ASSERT_EQ(parameter.grad().scalar_type(), kind);
    }
  });
}

TEST(ReplicateGradients, MixedDtypes) {
  struct Both : torch::nn::Module {
    Both() {
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
    Both ours;
    Both reference;
    auto root = replicate(ours, on(rank));
    const auto groups = root.plan().units.at(0).groups;
    ASSERT_EQ(groups.size(), 2U);
    ASSERT_EQ(groups[0].dtype, "float32");
    ASSERT_EQ(groups[1].dtype, "float64");
    for (int step = 0; step < 3; ++step) {
      ours.forward(batch(step, rank.rank(), 3)).sum().backward();
      reference_backward(rank, [&](int r) { return reference.forward(batch(step, r, 3)).sum(); });
      assert_same(ours, reference, "step " + std::to_string(step));
    }
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
    auto ours = mlp({4, 6, 3});
    auto reference = mlp({4, 6, 3});
    replicate(ours, on(rank));
    for (size_t step = 0; step <= changes.size(); ++step) {
      const auto data = static_cast<int>(step);
      ours->forward(batch(data, rank.rank(), 4)).sum().backward();
      reference_backward(rank, [&](int r) { return reference->forward(batch(data, r, 4)).sum(); });
      assert_same(*ours, *reference, "step " + std::to_string(step));
      if (step < changes.size()) {
        for (const auto& parameter : ours->parameters()) changes[step](parameter.grad());
      }
      for (auto* model : {&ours, &reference}) (*model)->zero_grad();
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
    auto reference = convolution();
    replicate(ours, on(rank));
    const auto images = [](int r) { return torch::randn({2, 3, 5, 5}, generator(r)); };
    for (int step = 0; step < 3; ++step) {
      ours->forward(images(rank.rank())).sum().backward();
      reference_backward(rank, [&](int r) { return reference->forward(images(r)).sum(); });
      assert_same(*ours, *reference, "step " + std::to_string(step));
      ASSERT_TRUE(ours->weight.grad().is_contiguous(torch::MemoryFormat::ChannelsLast));
    }
  });
}

} // namespace shardwise::test
