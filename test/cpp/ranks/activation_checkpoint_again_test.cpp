// The second run of an activation checkpoint: under the modes of the first, and what is an error.
#include "ranks/activation_checkpoint_product.h"

#include <ATen/autocast_mode.h>

namespace shardwise::test {
namespace {

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
  EXPECT_NE(text_of([&] { y.backward({}, true); }).find("today not"), std::string::npos);
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
    EXPECT_NE(text_of([&] { y.backward(); }).find("modified by an inplace operation"), std::string::npos);
  }
  const auto inside =
      activation_checkpoint([&](const Tensor& t) { return product(t.add_(1)); }, torch::ones({2, 3})).sum();
  EXPECT_NE(text_of([&] { inside.backward(); }).find("modified by an inplace operation"), std::string::npos);
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
    const auto x = torch::ones({1000}).requires_grad_();
    const auto y = activation_checkpoint(
        ActivationCheckpointOptions().preserve_rng_state(keep),
        [](const Tensor& t) { return torch::dropout(t, 0.5, true); }, x);
    y.sum().backward();
    EXPECT_EQ(torch::equal(x.grad(), y.detach()), keep);
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
