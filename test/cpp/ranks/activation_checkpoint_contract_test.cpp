// What activation_checkpoint.h promises beside equal results: the ways to call it and to run backward.
#include "ranks/activation_checkpoint_product.h"

namespace shardwise::test {
namespace {

TEST(Checkpoint, TakesCallablesAndReturnsWhatTheyReturn) {
  const auto x = leaf({2, 3});
  torch::nn::Linear linear(3, 3);
  EXPECT_TRUE(torch::equal(activation_checkpoint(linear, x), linear->forward(x)));
  const Tensors list = activation_checkpoint(
      [](const Tensor& a, const Tensor& b) {
        return Tensors{a + b, a * b};
      },
      x, x);
  EXPECT_TRUE(torch::equal(list.at(1), x * x));
  const std::tuple<Tensor, std::tuple<Tensor, Tensor>> nested = activation_checkpoint(
      ActivationCheckpointOptions().preserve_rng_state(false),
      [](const Tensor& a, const Tensor& none) { return std::tuple(a + 1, std::tuple(a + 2, none)); }, x, Tensor());
  EXPECT_TRUE(torch::equal(std::get<0>(std::get<1>(nested)), x + 2));
  EXPECT_FALSE(std::get<1>(std::get<1>(nested)).defined());
  const auto w = leaf({3});
  const auto nothing_given = activation_checkpoint([&] { return w * 2; });
  nothing_given.sum().backward();
  EXPECT_TRUE(torch::equal(w.grad(), torch::full({3}, 2.0)));
}

TEST(Checkpoint, WithoutGradModeIsAPlainCall) {
  const Product product;
  const auto x = leaf({2, 3});
  {
    const torch::NoGradGuard guard;
    EXPECT_FALSE(activation_checkpoint(product, x).requires_grad());
  }
  {
    const c10::InferenceMode guard;
    EXPECT_TRUE(activation_checkpoint(product, x).is_inference());
  }
  EXPECT_EQ(*product.runs, 2);
  const auto constant = activation_checkpoint([](const Tensor& t) { return t + 1; }, x.detach());
  EXPECT_FALSE(constant.requires_grad());
}

TEST(Checkpoint, T11HooksOfLeavesFireOnce) {
  const Product product;
  int hooks = 0;
  product.w.register_hook([&](const Tensor& gradient) {
    ++hooks;
    return gradient * 2;
  });
  const auto x = leaf({2, 3});
  auto y = activation_checkpoint(
      [=](const Tensor& t) { return activation_checkpoint(product, activation_checkpoint(product, t)); }, x);
  y.sum().backward();
  EXPECT_EQ(hooks, 1);
  const auto plain = product(product(x)).sum();
  EXPECT_TRUE(torch::equal(product.w.grad(), torch::autograd::grad({plain}, {product.w})[0]));
}

TEST(Checkpoint, CapturedTensorsGetTheirGradient) {
  const Product product;
  const auto x = leaf({2, 3});
  const auto run = [&](bool on) {
    const auto before = x.matmul(product.w).sin(); // in the graph before, and behind it a parameter used inside too
    int hooks = 0;
    before.register_hook([&](const Tensor&) { ++hooks; });
    const auto fn = [=](const Tensor& t) { return product(t) * before; };
    const auto loss = (on ? activation_checkpoint(fn, x) : fn(x)).pow(2).sum();
    const auto gradients = torch::autograd::grad({loss}, {x, product.w});
    EXPECT_EQ(hooks, 1);
    return gradients;
  };
  const auto with = run(true);
  const auto plain = run(false);
  EXPECT_TRUE(torch::allclose(with[0], plain[0]));
  EXPECT_TRUE(torch::allclose(with[1], plain[1]));
}

TEST(Checkpoint, EveryWayOfBackward) {
  const Product product;
  const auto x = leaf({2, 3});
  const auto expected = torch::autograd::grad({product(x).sum()}, {x, product.w});
  *product.runs = 0;
  const auto y = activation_checkpoint(product, x).sum();
  const auto only_x = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true);
  EXPECT_TRUE(torch::equal(only_x[0], expected[0]));
  EXPECT_FALSE(product.w.grad().defined());
  y.backward({}, true, false, Tensors{product.w});
  EXPECT_TRUE(torch::equal(product.w.grad(), expected[1]));
  EXPECT_FALSE(x.grad().defined());
  y.backward();
  EXPECT_TRUE(torch::equal(product.w.grad(), expected[1] * 2));
  EXPECT_EQ(*product.runs, 4) << "forward and three backwards";
  EXPECT_EQ(product.runs.use_count(), 1) << "the copy of the function is gone";
  EXPECT_NE(text_of([&] { y.backward(); }).find("retain_graph"), std::string::npos);
  const auto again = activation_checkpoint(product, x).sum();
  expect_error<Error>([&] { torch::autograd::grad({again}, {x}, {}, true, true); }, {"gradients of gradients"});
}

TEST(Checkpoint, OutputsMayBeUnusedOrWithoutGradient) {
  const Product product;
  const auto x = leaf({2, 3});
  const auto fn = [=](const Tensor& t) {
    const auto y = product(t);
    return std::tuple(y, y > 0, y.sin(), Tensor(), y.detach());
  };
  const auto [y, mask, sine, undefined, detached] = activation_checkpoint(fn, x);
  EXPECT_FALSE(mask.requires_grad());
  EXPECT_FALSE(undefined.defined());
  EXPECT_FALSE(detached.requires_grad());
  const auto expected = torch::autograd::grad({product(x).sin().sum()}, {x, product.w});
  const auto found = torch::autograd::grad({sine.sum()}, {x, product.w});
  EXPECT_TRUE(torch::equal(found[0], expected[0]));
  EXPECT_TRUE(torch::equal(found[1], expected[1]));
}

TEST(Checkpoint, OutputsMayBeChangedInPlace) {
  const Product product;
  const auto x = leaf({2, 3});
  const auto run = [&](bool on) {
    const auto fn = [=](const Tensor& t) {
      const auto y = product(t);
      return std::tuple(y, y.view(-1), t.view(-1), product.w.view(-1));
    };
    auto [y, flat, view, w] = on ? activation_checkpoint(fn, x) : fn(x);
    if (on) {
      flat.mul_(3);
      view.add_(1);
      w.mul_(5);
    } else {
      flat = flat * 3;
      view = view + 1;
      w = w * 5;
    }
    const auto loss = y.sum() * 7 + flat.pow(2).sum() + view.pow(2).sum() + w.pow(2).sum() + x.pow(2).sum();
    return torch::autograd::grad({loss}, {x, product.w});
  };
  const auto with = run(true);
  const auto plain = run(false);
  EXPECT_TRUE(torch::allclose(with[0], plain[0]));
  EXPECT_TRUE(torch::allclose(with[1], plain[1]));
}

TEST(Checkpoint, WhatIsReturnedAsItIsStaysItself) {
  const auto x = leaf({3});
  const auto w = leaf({3});
  const auto before = x * 2;
  const auto [same, parameter, captured, made] =
      activation_checkpoint([=](const Tensor& t) { return std::tuple(t, w, before, t * w); }, x);
  EXPECT_TRUE(same.is_same(x));
  EXPECT_TRUE(parameter.is_same(w));
  EXPECT_TRUE(captured.is_same(before));
  (same + parameter + captured + made).sum().backward();
  EXPECT_TRUE(torch::allclose(x.grad(), 3 + w.detach()));
  EXPECT_TRUE(torch::allclose(w.grad(), 1 + x.detach()));
}

TEST(Checkpoint, HoldsNothingOnceTheGraphIsGone) {
  const Product product;
  {
    const auto y = activation_checkpoint(product, activation_checkpoint(product, leaf({2, 3})));
    EXPECT_EQ(product.runs.use_count(), 3);
  }
  EXPECT_EQ(product.runs.use_count(), 1);
}

} // namespace
} // namespace shardwise::test
