// Backward hooks: what they get, when they fire, what they may change.
#include <gtest/gtest.h>
#include <shardwise/shardwise.h>
#include <torch/torch.h>

namespace shardwise {
namespace {

using torch::nn::Linear;
using torch::nn::Module;

TEST(Hooks, BackwardHooksGetTheGradientsOfOutputsAndInputs) {
  Linear linear(3, 2);
  const auto x = torch::randn({4, 3});
  const auto plain_x = x.clone().requires_grad_();
  const auto plain = linear->forward(plain_x);
  plain.retain_grad();
  plain.sin().sum().backward();
  const auto want_weight = linear->weight.grad().clone();
  linear->zero_grad();

  std::string log;
  register_full_backward_hook(
      *linear, [&](Module& module, HookTensors& input_gradients, const HookTensors& output_gradients) {
        log += "b";
        EXPECT_EQ(&module, linear.get());
        ASSERT_EQ(input_gradients.size(), 1U);
        ASSERT_EQ(output_gradients.size(), 1U);
        EXPECT_TRUE(at::equal(input_gradients[0], plain_x.grad()));
        EXPECT_TRUE(at::equal(output_gradients[0], plain.grad()));
      });
  register_full_backward_pre_hook(*linear, [&](Module&, HookTensors& output_gradients) {
    log += "a";
    ASSERT_EQ(output_gradients.size(), 1U);
    EXPECT_TRUE(at::equal(output_gradients[0], plain.grad()));
    EXPECT_FALSE(linear->weight.grad().defined());
  });
  const auto hooked_x = x.clone().requires_grad_();
  auto result = call(linear, hooked_x);
  EXPECT_TRUE(at::equal(result, plain));
  result.sin().sum().backward();
  EXPECT_EQ(log, "ab");
  EXPECT_TRUE(at::equal(hooked_x.grad(), plain_x.grad()));
  EXPECT_TRUE(at::equal(linear->weight.grad(), want_weight));
}

TEST(Hooks, BackwardHooksReplaceGradients) {
  Linear linear(3, 2);
  const auto x = torch::randn({4, 3}).requires_grad_();
  linear->forward(x).sum().backward();
  const auto want_x = x.grad().clone();
  const auto want_weight = linear->weight.grad().clone();
  linear->zero_grad();
  x.mutable_grad().reset();

  register_full_backward_pre_hook(*linear, [](Module&, HookTensors& gradients) { gradients[0] = gradients[0] * 2; });
  register_full_backward_hook(*linear, [](Module&, HookTensors& gradients, const HookTensors& output_gradients) {
    EXPECT_TRUE(at::equal(output_gradients[0], torch::full({4, 2}, 2.0)));
    gradients[0] = gradients[0] * 4;
  });
  call(linear, x).sum().backward();
  EXPECT_TRUE(at::allclose(linear->weight.grad(), want_weight * 2));
  EXPECT_TRUE(at::allclose(x.grad(), want_x * 8));
}

TEST(Hooks, BackwardHooksFireInOrder) {
  Linear linear(3, 2);
  std::string log;
  register_full_backward_hook(*linear, [&](Module&, HookTensors&, const HookTensors&) { log += "c"; });
  register_full_backward_pre_hook(*linear, [&](Module&, HookTensors&) { log += "b"; });
  register_full_backward_hook(
      *linear, [&](Module&, HookTensors&, const HookTensors&) { log += "-"; }, HookOptions().prepend(true));
  register_full_backward_pre_hook(
      *linear, [&](Module&, HookTensors&) { log += "a"; }, HookOptions().prepend(true));
  auto loss = call(linear, torch::ones({3}).requires_grad_()).sum();
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_EQ(log, "ab-c");
  loss.backward();
  EXPECT_EQ(log, "ab-cab-c");
}

TEST(Hooks, WithoutInputGradientsTheBackwardHookFiresAtTheOutputs) {
  torch::nn::Embedding embedding(5, 3);
  int fired = 0;
  auto handle = register_full_backward_hook(
      *embedding, [&](Module&, HookTensors& input_gradients, const HookTensors& output_gradients) {
        ++fired;
        ASSERT_EQ(input_gradients.size(), 1U);
        EXPECT_FALSE(input_gradients[0].defined());
        EXPECT_TRUE(output_gradients[0].defined());
        EXPECT_FALSE(embedding->weight.grad().defined());
      });
  const auto x = torch::tensor({1, 4});
  call(embedding, x).sum().backward();
  EXPECT_EQ(fired, 1);
  EXPECT_TRUE(embedding->weight.grad().defined());

  handle.remove();
  register_full_backward_hook(
      *embedding, [](Module&, HookTensors& gradients, const HookTensors&) { gradients[0] = torch::ones({2}); });
  EXPECT_THROW(call(embedding, x).sum().backward(), Error);
}

TEST(Hooks, OutputsWithoutAGradientAreUndefined) {
  torch::nn::LSTM lstm(4, 5);
  std::vector<bool> defined;
  register_full_backward_pre_hook(*lstm, [&](Module&, HookTensors& gradients) {
    for (const auto& gradient : gradients) defined.push_back(gradient.defined());
  });
  const auto x = torch::randn({2, 3, 4}).requires_grad_();
  std::get<0>(lstm->forward(x)).sum().backward();
  const auto want = x.grad().clone();
  x.mutable_grad().reset();
  std::get<0>(call(lstm, x)).sum().backward();
  EXPECT_EQ(defined, (std::vector<bool>{true, false, false}));
  EXPECT_TRUE(at::equal(x.grad(), want));
}

TEST(Hooks, BackwardHooksStayAwayWithoutGradModeAfterRemovalAndWithoutTheModule) {
  Linear linear(3, 2);
  int fired = 0;
  auto handle = register_full_backward_hook(*linear, [&](Module&, HookTensors&, const HookTensors&) { ++fired; });
  const auto x = torch::ones({3}).requires_grad_();
  {
    const torch::NoGradGuard no_grad;
    EXPECT_FALSE(call(linear, x).requires_grad());
  }
  auto loss = call(linear, x).sum();
  handle.remove();
  loss.backward();
  EXPECT_EQ(fired, 0);
  EXPECT_TRUE(x.grad().defined());

  register_full_backward_hook(*linear, [&](Module&, HookTensors&, const HookTensors&) { ++fired; });
  loss = call(linear, x).sum();
  linear = nullptr;
  loss.backward();
  EXPECT_EQ(fired, 0);
}

TEST(Hooks, ExceptionsOfBackwardHooksReachBackward) {
  Linear linear(3, 2);
  auto handle = register_full_backward_pre_hook(*linear, [](Module&, HookTensors&) { throw std::out_of_range("pre"); });
  EXPECT_THROW(call(linear, torch::ones({3})).sum().backward(), std::out_of_range);
  handle.remove();
  register_full_backward_hook(*linear, [](Module&, HookTensors& gradients, const HookTensors&) { gradients.clear(); });
  EXPECT_THROW(call(linear, torch::ones({3}).requires_grad_()).sum().backward(), ValueError);
}

} // namespace
} // namespace shardwise
