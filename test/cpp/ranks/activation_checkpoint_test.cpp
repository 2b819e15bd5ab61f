// What activation_checkpoint.h promises: the ways to call it and to run backward, and what its second run is.
#include "ranks/models.h"
#include "support/expect.h"

#include <ATen/autocast_mode.h>

namespace shardwise::test {
namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

Tensor leaf(at::IntArrayRef sizes) {
  return torch::randn(sizes).requires_grad_();
}

/// x * w, and how often it ran.
struct Product {
  Tensor w = leaf({3, 3});
  std::shared_ptr<int> runs = std::make_shared<int>(0);
  Tensor operator()(const Tensor& x) const {
    ++*runs;
    return x.matmul(w).tanh();
  }
};

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
  expect_text(text_of([&] { y.backward(); }), {"retain_graph"});
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

TEST(Checkpoint, ActivationsAreGoneAfterForward) {
  auto layers = mlp({6, 32, 32, 3});
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> activations;
  int64_t gone_inside = 0;
  const auto gone = [&] {
    return std::count_if(activations.begin(), activations.end(), [](const auto& weak) { return weak.expired(); });
  };
  const auto run = [&](const Tensor& x) {
    auto y = x;
    for (auto& layer : *layers) {
      const auto hidden = layer.forward(y);
      activations.push_back(hidden.storage().getWeakStorageImpl());
      y = hidden.sin();
    }
    return y.sum();
  };
  const auto x = batch(0, 0, 6);
  {
    const auto plain = run(x);
    EXPECT_EQ(gone(), 0) << "without an activation checkpoint they are kept";
  }
  activations.clear();
  auto y = activation_checkpoint(run, x);
  EXPECT_EQ(gone(), 5);
  activations.clear();
  y = activation_checkpoint(
      [&](const Tensor& t) {
        const auto inner = activation_checkpoint(run, t);
        gone_inside = gone();
        return inner * 2;
      },
      x);
  EXPECT_EQ(gone_inside, 5);
  y.backward();
  EXPECT_EQ(gone(), static_cast<int64_t>(activations.size()));
  EXPECT_EQ(activations.size(), 15U) << "forward, its second run, and the second run of the inner one";
}

TEST(Checkpoint, HoldsNothingOnceTheGraphIsGone) {
  const Product product;
  {
    const auto y = activation_checkpoint(product, activation_checkpoint(product, leaf({2, 3})));
    EXPECT_EQ(product.runs.use_count(), 3);
  }
  EXPECT_EQ(product.runs.use_count(), 1);
}

TEST(Checkpoint, ErrorsOfTheFunctionComeThrough) {
  const Product product;
  bool fails = true;
  const auto fn = [&](const Tensor& t) {
    const auto y = torch::dropout(product(t), 0.5, true);
    if (fails) throw std::runtime_error("today not");
    return y;
  };
  EXPECT_EQ(text_of([&] { activation_checkpoint(fn, torch::ones({2, 3})); }), "today not");
  fails = false;
  const auto y = activation_checkpoint(fn, torch::ones({2, 3})).sum();
  fails = true;
  const auto before = at::detail::getDefaultCPUGenerator().get_state();
  expect_text(text_of([&] { y.backward({}, true); }), {"today not"});
  EXPECT_TRUE(torch::equal(before, at::detail::getDefaultCPUGenerator().get_state()));
  EXPECT_FALSE(product.w.grad().defined());
  fails = false;
  y.backward();
  EXPECT_TRUE(product.w.grad().defined());
}

TEST(Checkpoint, ChangedInputsAreAnError) {
  const Product product;
  for (const bool gradient : {true, false}) {
    auto x = leaf({2, 3}).sin();
    if (!gradient) x = x.detach();
    const auto y = activation_checkpoint(product, x).sum();
    x.add_(1);
    expect_text(text_of([&] { y.backward(); }), {"modified by an inplace operation"});
  }
  const auto inside =
      activation_checkpoint([&](const Tensor& t) { return product(t.add_(1)); }, torch::ones({2, 3})).sum();
  expect_text(text_of([&] { inside.backward(); }), {"modified by an inplace operation"});
}

TEST(Checkpoint, AnotherSecondRunIsAnError) {
  const auto x = leaf({4});
  const auto w = leaf({4});
  const auto v = leaf({4});
  int run = 0;
  const auto refused = [&](const std::function<Tensors(bool first)>& fn, const std::vector<std::string>& parts) {
    run = 0;
    const auto y = activation_checkpoint([&](const Tensor&) { return fn(run++ == 0); }, x)[0].sum();
    expect_error<Error>([&] { y.backward(); }, parts);
    EXPECT_FALSE(w.grad().defined() || v.grad().defined());
  };
  refused(
      [&](bool first) { return Tensors{first ? w * 2 : (w * 2).slice(0, 0, 3)}; },
      {"output 0", "sizes [4]", "sizes [3]", "do the same both times"});
  refused([&](bool first) { return Tensors{(w * 2).to(first ? at::kFloat : at::kDouble)}; }, {"Float", "Double"});
  refused([&](bool first) { return first ? Tensors{w * 2} : Tensors{w * 2, w}; }, {"1 outputs", "2 when it ran again"});
  refused([&](bool first) { return Tensors{first ? w * 2 : w.detach()}; }, {"with a gradient", "without a gradient"});
  refused([&](bool first) { return Tensors{first ? w * 2 : w * v}; }, {"used other parameters"});
  refused([&](bool first) { return Tensors{first ? w * v : w * 2}; }, {"used other parameters"});
}

TEST(Checkpoint, RunsAgainUnderTheModesOfForward) {
  torch::nn::Sequential layers(torch::nn::Linear(4, 4), torch::nn::Tanh(), torch::nn::Linear(4, 4));
  const auto x = torch::randn({3, 4});
  const auto run = [&](bool on) {
    layers->zero_grad();
    Tensor y;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    const auto fn = [&](const Tensor& t) { return layers->forward(t); };
    layers->forward(x); // fills the cache of casts
    y = on ? activation_checkpoint(fn, x) : fn(x);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    y.sum().backward();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    Tensors gradients;
    for (const auto& parameter : layers->parameters()) gradients.push_back(parameter.grad().clone());
    return gradients;
  };
  const auto with = run(true);
  const auto plain = run(false);
  for (size_t i = 0; i < with.size(); ++i) EXPECT_TRUE(torch::equal(with[i], plain[i])) << i;
}

TEST(Checkpoint, RandomStateIsKeptUnlessToldOtherwise) {
  for (const bool keep : {true, false}) {
    const auto options = ActivationCheckpointOptions().preserve_rng_state(keep);
    const auto x = torch::ones({1000}).requires_grad_();
    const auto drop = [](const Tensor& t) { return torch::dropout(t, 0.5, true); };
    // One inside of another.
    const auto y = activation_checkpoint(
        options, [&](const Tensor& t) { return drop(activation_checkpoint(options, drop, t)); }, x);
    const auto before = at::detail::getDefaultCPUGenerator().get_state();
    y.sum().backward();
    EXPECT_EQ(torch::equal(x.grad(), y.detach()), keep);
    EXPECT_EQ(torch::equal(before, at::detail::getDefaultCPUGenerator().get_state()), keep);
  }
}

TEST(Checkpoint, T22BackwardInInferenceMode) {
  const Product product;
  const auto x = leaf({2, 3});
  const auto expected = torch::autograd::grad({product(x).sum()}, {product.w})[0];
  const auto y = activation_checkpoint(product, x).sum();
  {
    const c10::InferenceMode guard;
    y.backward({}, true);
  }
  EXPECT_TRUE(torch::equal(product.w.grad(), expected));
  for (const auto& one : {x, product.w}) one.mutable_grad().reset(); // made in inference mode, they stay what they are
  y.backward();
  EXPECT_TRUE(torch::equal(product.w.grad(), expected));
}

} // namespace
} // namespace shardwise::test
