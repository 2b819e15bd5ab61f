// The touch trigger under whole modules that are called directly.
#include "ranks/touch_refiller.h"
#include "support/ranks.h"

#include <gtest/gtest.h>

namespace shardwise::nn::test {
namespace {

at::Tensor outputs(torch::nn::LinearImpl& linear, const at::Tensor& input) {
  return linear.forward(input);
}

at::Tensor outputs(torch::nn::LSTMImpl& lstm, const at::Tensor& input) {
  const auto [output, state] = lstm.forward(input);
  return at::cat({output.flatten(), std::get<0>(state).flatten(), std::get<1>(state).flatten()});
}

/// A module, and a copy of it that is left alone.
template <typename Module>
struct Pair {
  template <typename Options>
  explicit Pair(const Options& options)
      : module(std::make_shared<Module>(options)),
        copy(std::dynamic_pointer_cast<Module>(module->clone())),
        refiller(Refiller::watch(module->parameters())) {}

  /// One step of both: forward, the memory freed, backward, the memory freed. All that comes out must be equal.
  void train(const at::Tensor& x, bool input_gradient = true) {
    const auto input = x.clone().requires_grad_(input_gradient);
    const auto want_input = x.clone().requires_grad_(input_gradient);
    ASSERT_TRUE(refiller->freed());
    const auto output = outputs(*module, input);
    const auto want = outputs(*copy, want_input);
    EXPECT_TRUE(at::equal(output, want));

    refiller->free();
    EXPECT_TRUE(refiller->freed());
    module->zero_grad();
    copy->zero_grad();
    output.sin().sum().backward();
    want.sin().sum().backward();
    refiller->free();
    if (input_gradient) {
      EXPECT_TRUE(at::equal(input.grad(), want_input.grad()));
    }
    const auto parameters = module->parameters();
    const auto want_parameters = copy->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      EXPECT_TRUE(at::equal(parameters[i].grad(), want_parameters[i].grad())) << "parameter " << i;
    }
    EXPECT_TRUE(refiller->versions_unmoved());

    refiller->step();
    at::NoGradGuard no_grad;
    for (const auto& parameter : want_parameters) parameter.sub_(parameter.grad(), 0.1);
  }

  std::shared_ptr<Module> module;
  std::shared_ptr<Module> copy;
  std::shared_ptr<Refiller> refiller;
};

Pair<torch::nn::LinearImpl> linear_pair() {
  return Pair<torch::nn::LinearImpl>(torch::nn::LinearOptions(5, 3));
}

Pair<torch::nn::LSTMImpl> lstm_pair() {
  return Pair<torch::nn::LSTMImpl>(torch::nn::LSTMOptions(4, 6).num_layers(2).bidirectional(true));
}

TEST(Touch, LinearIsRefilledInForwardAndInBackward) {
  auto pair = linear_pair();
  for (int step = 1; step <= 5; ++step) {
    pair.train(torch::randn({7, 5}));
    EXPECT_EQ(pair.refiller->refilled, 2 * step);
  }
}

TEST(Touch, LstmIsRefilledInForwardAndInBackward) {
  auto pair = lstm_pair();
  for (int step = 1; step <= 5; ++step) {
    pair.train(torch::randn({3, 2, 4}));
    EXPECT_EQ(pair.refiller->refilled, 2 * step);
  }
}

TEST(Touch, BackwardThatNeedsNoWeightRefillsNothing) {
  auto pair = linear_pair();
  for (int step = 1; step <= 3; ++step) {
    pair.train(torch::randn({7, 5}), /*input_gradient=*/false);
    EXPECT_EQ(pair.refiller->refilled, step);
  }
}

TEST(Touch, HooksOfTheLeavesStillFire) {
  struct Count : torch::autograd::PostAccumulateGradHook {
    explicit Count(int& count) : count(count) {}
    void operator()(const at::Tensor&) override {
      ++count;
    }
    int& count;
  };
  int hooks = 0, accumulated = 0;
  auto pair = lstm_pair();
  for (const auto& parameter : pair.module->parameters()) {
    parameter.register_hook([&](const at::Tensor&) { ++hooks; });
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<Count>(accumulated));
  }
  EXPECT_EQ(pair.refiller->refilled, 0);
  pair.train(torch::randn({3, 2, 4}));
  EXPECT_EQ(hooks, 16);
  EXPECT_EQ(accumulated, 16);
}

TEST(Touch, ErrorsOfTheListenerReachTheCaller) {
  auto pair = linear_pair();
  pair.train(torch::randn({7, 5}));
  const auto x = torch::randn({7, 5}).requires_grad_();
  const auto code = [&](const auto& run) {
    pair.refiller->error = NoMemoryToday{42};
    int caught = 0;
    try {
      run();
    } catch (const NoMemoryToday& error) {
      caught = error.code;
    }
    pair.refiller->error.reset();
    return caught;
  };
  EXPECT_EQ(code([&] { pair.module->forward(x); }), 42);
  pair.train(torch::randn({7, 5}));
  const auto output = pair.module->forward(x);
  pair.refiller->free();
  EXPECT_EQ(code([&] { output.sum().backward(); }), 42);
  EXPECT_FALSE(x.grad().defined());
  pair.train(torch::randn({7, 5}));
}

TEST(Touch, RanksThatAreThreads) {
  shardwise::test::run_ranks(2, [](shardwise::test::Rank& rank) {
    for (int round = 0; round < 5; ++round) {
      auto linear = linear_pair();
      auto lstm = lstm_pair();
      for (int step = 1; step <= 5; ++step) {
        linear.train(torch::randn({7, 5}, rank.generator()));
        lstm.train(torch::randn({3, 2, 4}, rank.generator()));
        EXPECT_EQ(linear.refiller->refilled, 2 * step);
        EXPECT_EQ(lstm.refiller->refilled, 2 * step);
      }
    }
  });
}

TEST(Touch, ForwardWithoutGradients) {
  auto pair = lstm_pair();
  const auto x = torch::randn({3, 2, 4});
  {
    at::NoGradGuard no_grad;
    EXPECT_TRUE(at::equal(outputs(*pair.module, x), outputs(*pair.copy, x)));
  }
  pair.refiller->free();
  {
    c10::InferenceMode inference;
    EXPECT_TRUE(at::equal(outputs(*pair.module, x), outputs(*pair.copy, x)));
  }
  EXPECT_EQ(pair.refiller->refilled, 2);
  pair.refiller->free();
  pair.train(x);
}

TEST(Touch, FreedLeavesAreNeverRead) {
  auto pair = linear_pair();
  const auto x = torch::randn({7, 5});
  const auto& weight = pair.module->weight;
  EXPECT_TRUE(group::is_freed(weight));
  EXPECT_TRUE(group::is_freed(weight.data()));
  EXPECT_FALSE(group::is_freed(x));
  EXPECT_FALSE(group::is_freed(at::empty({0})));
  EXPECT_FALSE(group::is_freed(at::Tensor()));

  pair.refiller->refills = false;
  const auto lazy = error_of([&] { pair.module->forward(x); });
  EXPECT_NE(lazy.find("aten::t "), std::string::npos) << lazy;
  EXPECT_NE(lazy.find("[3, 5]"), std::string::npos) << lazy;
  EXPECT_NE(lazy.find("its unit did not gather it"), std::string::npos) << lazy;

  pair.refiller->refills = true;
  const auto output = pair.module->forward(x.clone().requires_grad_());
  EXPECT_FALSE(group::is_freed(weight));
  pair.refiller->free();
  pair.refiller.reset();
  const auto gone = error_of([&] { output.sum().backward(); });
  EXPECT_NE(gone.find("the unit that could gather it again is gone"), std::string::npos) << gone;
}

} // namespace
} // namespace shardwise::nn::test
