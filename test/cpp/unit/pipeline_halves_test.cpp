// A backward in two halves, against one in a whole.
#include "pipeline/backward_halves.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/torch.h>
#include <catch2/catch.hpp>

#include <random>

namespace shardwise::pipeline {
namespace {

using Tensors = std::vector<at::Tensor>;

at::Tensor leaf(at::Tensor values) {
  return values.detach().clone().set_requires_grad(true);
}

Tensors leaves(const Tensors& values) {
  Tensors made;
  for (const auto& each : values) made.push_back(leaf(each));
  return made;
}

Tensors gradients_of(const Tensors& tensors) {
  Tensors found;
  for (const auto& tensor : tensors) found.push_back(tensor.grad());
  return found;
}

void check_close(const Tensors& got, const Tensors& expected) {
  REQUIRE(got.size() == expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    INFO("number " << i);
    REQUIRE(got[i].defined() == expected[i].defined());
    if (got[i].defined()) REQUIRE(at::allclose(got[i], expected[i], 1e-10, 1e-12));
  }
}

/// A random graph of square matrices: a few outputs, from some of these leaves. Parameters may be used several times,
/// and on their own; an output may not depend on an input at all.
Tensors random_outputs(int seed, const Tensors& inputs, const Tensors& parameters) {
  std::mt19937 random(seed);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  Tensors known = inputs;
  known.insert(known.end(), parameters.begin(), parameters.end());
  for (int i = 0; i < 12; ++i) {
    // Newer ones more often, so that graphs become deep.
    const auto& a = known[std::max(below(known.size()), below(known.size()))];
    const auto& b = known[below(known.size())];
    switch (below(6)) {
      case 0:
        known.push_back(a.matmul(b));
        break;
      case 1:
        known.push_back(a + b);
        break;
      case 2:
        known.push_back(a * b.tanh());
        break;
      case 3:
        known.push_back(at::linear(a, b, b[0]));
        break;
      case 4: {
        const auto halves = a.chunk(2);
        known.push_back(at::cat({halves[1], halves[0]}).sigmoid());
        break;
      }
      default:
        known.push_back(at::layer_norm(a, {a.size(-1)}, b[1], b[2]));
    }
  }
  return {known.back(), known[known.size() - 3], known[known.size() - 5]};
}

} // namespace

TEST_CASE("Halves.GradientsAreThoseOfAWholeBackward") {
  torch::manual_seed(1);
  for (int seed = 0; seed < 400; ++seed) {
    INFO("seed " << seed);
    Tensors values;
    for (int i = 0; i < 5; ++i) values.push_back(torch::randn({4, 4}, torch::kDouble));
    const auto split = [](const Tensors& all) {
      return std::pair(Tensors(all.begin(), all.begin() + 2), Tensors(all.begin() + 2, all.end()));
    };
    const auto [inputs, parameters] = split(leaves(values));
    const auto [whole_inputs, whole_parameters] = split(leaves(values));
    const auto keep_trained = [](const Tensors& outputs) {
      Tensors kept;
      for (const auto& output : outputs) {
        if (output.requires_grad()) kept.push_back(output);
      }
      return kept;
    };
    auto outputs = keep_trained(random_outputs(seed, inputs, parameters));
    const auto whole = keep_trained(random_outputs(seed, whole_inputs, whole_parameters));
    Tensors gradients;
    for (const auto& output : outputs) gradients.push_back(torch::randn_like(output));
    torch::autograd::backward(whole, gradients);
    BackwardHalves halves(std::move(outputs), gradients, /*repeats=*/seed % 10 == 0);
    const auto found = halves.input_gradients(inputs);
    check_close(found, gradients_of(whole_inputs));
    for (const auto& parameter : parameters) REQUIRE(!parameter.grad().defined());
    halves.accumulate_parameter_gradients();
    check_close(gradients_of(parameters), gradients_of(whole_parameters));
  }
}

TEST_CASE("Halves.HooksRunOnce") {
  const auto x = leaf(torch::randn({3, 4}));
  const auto w = leaves({torch::randn({4, 4}), torch::randn({4, 4})});
  int calls = 0;
  const auto between = x.mm(w[0]);
  between.retain_grad();
  between.register_hook([&](const at::Tensor& gradient) {
    ++calls;
    return gradient * 2;
  });
  const auto gradient = torch::randn({3, 4});
  BackwardHalves halves({between.mm(w[1])}, {gradient}, false);
  const auto found = halves.input_gradients({x});
  halves.accumulate_parameter_gradients();
  CHECK(calls == 1);
  const auto arrived = 2 * gradient.mm(w[1].detach().t());
  check_close(
      {between.grad(), found[0], w[0].grad()}, {arrived, arrived.mm(w[0].detach().t()), x.detach().t().mm(arrived)});
}

namespace {

struct Doubling : torch::autograd::FunctionPostHook {
  Tensors operator()(const Tensors& results, const Tensors& /*gradients*/) override {
    Tensors doubled;
    for (const auto& result : results) doubled.push_back(result.defined() ? 2 * result : result);
    return doubled;
  }
};

} // namespace

TEST_CASE("Halves.AHookOnAnOperationsResultsIsHeard") {
  const auto x = leaf(torch::randn({3, 4}));
  const auto w = leaf(torch::randn({4, 4}));
  const auto y = x.mm(w);
  y.grad_fn()->add_post_hook(std::make_unique<Doubling>());
  const auto gradient = torch::randn({3, 4});
  BackwardHalves halves({y}, {gradient}, false);
  const auto found = halves.input_gradients({x});
  halves.accumulate_parameter_gradients();
  check_close({found[0], w.grad()}, {2 * gradient.mm(w.detach().t()), 2 * x.detach().t().mm(gradient)});
}

TEST_CASE("Halves.WhatTheSecondDoesNotNeedIsFreedAfterTheFirst") {
  const auto x = leaf(torch::randn({3, 4}));
  const auto w = leaves({torch::randn({4, 4}), torch::randn({4, 4})});
  auto between = x.mm(w[0]).tanh();
  const c10::weak_intrusive_ptr<c10::StorageImpl> kept(
      c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(between.storage().unsafeGetStorageImpl()));
  // The last product's gradients lead to it.
  BackwardHalves halves({(between * 3).mm(w[1])}, {torch::ones({3, 4})}, false);
  between.reset();
  CHECK(!kept.expired());
  halves.input_gradients({x});
  CHECK(kept.expired());
  halves.accumulate_parameter_gradients();
  for (const auto& each : w) CHECK(each.grad().defined());
}

} // namespace shardwise::pipeline
