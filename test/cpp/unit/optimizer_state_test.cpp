// What optimizers keep, by name: read, set, refused.
#include "optim/optimizer_state.h"

#include <shardwise/error.h>

#include <torch/optim.h>
#include <torch/torch.h>
#include <catch2/catch.hpp>

#include <memory>
#include <set>

using Catch::Matchers::Contains;
using shardwise::StateDict;
using shardwise::optim::OptimizerState;
using shardwise::optim::ParameterState;

namespace {

using Names = std::set<std::string>;

std::vector<torch::Tensor> two_parameters() {
  return {torch::arange(6.0).view({2, 3}).requires_grad_(), torch::ones({4}).requires_grad_()};
}

void train(torch::optim::Optimizer& optimizer, int steps) {
  for (int step = 0; step < steps; ++step) {
    int64_t number = 1;
    for (auto& group : optimizer.param_groups()) {
      for (auto& parameter : group.params()) {
        parameter.mutable_grad() = torch::full_like(parameter, 0.1 * static_cast<double>(number++ + step));
      }
    }
    optimizer.step();
  }
}

template <typename Dict>
Names names(const Dict& dict) {
  const auto keys = dict.keys();
  return Names(keys.begin(), keys.end());
}

using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<torch::Tensor>&)>;

template <typename Optimizer, typename Options>
Make make(Options options) {
  return [options](const auto& parameters) { return std::make_unique<Optimizer>(parameters, options); };
}

struct KindOfOptimizer {
  std::string name;
  Make make;
  Names tensors;
  Names numbers;
  Names options;
};

std::vector<KindOfOptimizer> kinds() {
  using namespace torch::optim;
  return {
      {"AdamW",
       make<AdamW>(AdamWOptions(0.1)),
       {"exp_avg", "exp_avg_sq"},
       {"step"},
       {"lr", "betas", "eps", "weight_decay", "amsgrad"}},
      {"Adam",
       make<Adam>(AdamOptions(0.1).amsgrad(true)),
       {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
       {"step"},
       {"lr", "betas", "eps", "weight_decay", "amsgrad"}},
      {"SGD",
       make<SGD>(SGDOptions(0.1).momentum(0.9).nesterov(true)),
       {"momentum_buffer"},
       {},
       {"lr", "momentum", "dampening", "weight_decay", "nesterov"}},
      {"Adagrad",
       make<Adagrad>(AdagradOptions(0.1).initial_accumulator_value(0.5)),
       {"sum"},
       {"step"},
       {"lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value"}},
      {"RMSprop",
       make<RMSprop>(RMSpropOptions(0.1).momentum(0.5).centered(true)),
       {"square_avg", "momentum_buffer", "grad_avg"},
       {"step"},
       {"lr", "momentum", "alpha", "eps", "centered", "weight_decay"}},
  };
}

ParameterState of_adam(const std::vector<int64_t>& sizes, double step) {
  ParameterState state;
  state.tensors.insert("exp_avg", torch::full(sizes, 0.5));
  state.tensors.insert("exp_avg_sq", torch::full(sizes, 0.25));
  state.numbers.insert("step", torch::tensor(step));
  return state;
}

} // namespace

TEST_CASE("what every optimizer of torch's keeps has the names that it has in Python") {
  for (const auto& one : kinds()) {
    INFO(one.name);
    const auto optimizer = one.make(two_parameters());
    train(*optimizer, 3);
    const OptimizerState state(*optimizer);
    CHECK(state.name() == one.name);
    CHECK(names(state.options(0)) == one.options);
    for (const auto& parameter : state.parameters(0)) {
      const auto kept = state.get(parameter);
      CHECK(names(kept.tensors) == one.tensors);
      CHECK(names(kept.numbers) == one.numbers);
      for (const auto& item : kept.tensors) CHECK(item.value().sizes() == parameter.sizes());
      if (kept.numbers.contains("step")) {
        CHECK(kept.numbers["step"].item<double>() == 3);
        CHECK(kept.numbers["step"].scalar_type() == torch::kFloat);
      }
      const auto listed = state.kept(0);
      CHECK(Names(listed.begin(), listed.end()) == one.tensors);
    }
  }
}

TEST_CASE("state and options that do not fit are refused, and change nothing") {
  const auto parameters = two_parameters();
  torch::optim::AdamW optimizer(parameters, torch::optim::AdamWOptions(0.1));
  OptimizerState state(optimizer);
  const auto refused = [&](const torch::Tensor& parameter, const ParameterState& given, const std::string& part) {
    CHECK_THROWS_WITH(state.set(parameter, given), Contains(part));
    CHECK_THROWS_AS(state.set(parameter, given), shardwise::ValueError);
  };
  auto unknown = of_adam({4}, 1);
  unknown.tensors.insert("momentum_buffer", torch::ones({4}));
  refused(parameters[1], unknown, "the state of parameter 1 of group 0 of AdamW has no 'momentum_buffer', but exp_avg");
  ParameterState missing;
  missing.tensors.insert("exp_avg", torch::ones({4}));
  missing.numbers.insert("step", torch::tensor(1.0));
  refused(parameters[1], missing, "needs 'exp_avg_sq', which is missing");
  refused(parameters[0], of_adam({3, 2}, 1), "has sizes [3, 2], but the parameter has [2, 3]");
  auto two_steps = of_adam({4}, 1);
  two_steps.numbers["step"] = torch::ones({2});
  refused(parameters[1], two_steps, "It must be one number");
  refused(torch::ones({4}), of_adam({4}, 1), "a tensor that is not one of its parameters");
  CHECK(state.get(parameters[0]).is_empty());
  CHECK(state.get(parameters[1]).is_empty());
  StateDict options;
  options.insert("momentum", torch::tensor(0.5));
  CHECK_THROWS_WITH(state.set_options(0, options), Contains("group 0 of AdamW has no 'momentum', but lr, betas"));
  StateDict one_beta;
  one_beta.insert("betas", torch::tensor(0.5));
  CHECK_THROWS_WITH(
      state.set_options(0, one_beta), Contains("'betas' of group 0 of AdamW was given 1 numbers; it has 2"));
  torch::optim::Adagrad adagrad(parameters);
  CHECK_THROWS_WITH(OptimizerState(adagrad).set(parameters[0], {}), Contains("needs 'sum', which is missing"));
}

TEST_CASE("optimizers of other classes, and state of the program's own, are refused") {
  torch::optim::LBFGS lbfgs(two_parameters());
  CHECK_THROWS_WITH(OptimizerState(lbfgs), Contains("LBFGS keeps vectors over all parameters"));
  CHECK_THROWS_AS(OptimizerState(lbfgs), shardwise::ValueError);
  struct Own : torch::optim::Optimizer {
    Own() : Optimizer(two_parameters(), std::make_unique<torch::optim::SGDOptions>(0.1)) {}
    torch::Tensor step(LossClosure) override {
      return {};
    }
  } own;
  CHECK_THROWS_WITH(OptimizerState(own), Contains("does not derive from one"));
  struct Derived : torch::optim::SGD {
    using torch::optim::SGD::SGD;
  } derived(two_parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  train(derived, 1);
  CHECK(names(OptimizerState(derived).get(derived.param_groups()[0].params()[0]).tensors) == Names{"momentum_buffer"});
  derived.state()[derived.param_groups()[0].params()[0].unsafeGetTensorImpl()] =
      std::make_unique<torch::optim::AdamParamState>();
  CHECK_THROWS_WITH(
      OptimizerState(derived).get(derived.param_groups()[0].params()[0]),
      Contains("keeps for parameter 0 of group 0 is not of torch::optim's class SGDParamState"));
}
