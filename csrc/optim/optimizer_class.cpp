#include "optim/optimizer_class.h"

#include "base/compute_guard.h"
#include "base/on_host.h"

#include <shardwise/error.h>

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <tuple>

namespace shardwise::optim {
namespace {

using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

// For each class: state() and options() call `visit` with the name and the value of each member.

template <typename OptimizerOf, typename StateOf, typename OptionsOf>
struct Types {
  using Optimizer = OptimizerOf;
  using State = StateOf;
  using Options = OptionsOf;
  static constexpr bool kBeginsWithState = false;
};

template <typename... Of>
struct AnyAdam : Types<Of...> {
  static void state(auto& state, const auto& visit) {
    visit("step", state.step());
    visit("exp_avg", state.exp_avg());
    visit("exp_avg_sq", state.exp_avg_sq());
    visit("max_exp_avg_sq", state.max_exp_avg_sq());
  }
  static void options(auto& options, const auto& visit) {
    visit("lr", options.lr());
    visit("betas", options.betas());
    visit("eps", options.eps());
    visit("weight_decay", options.weight_decay());
    visit("amsgrad", options.amsgrad());
  }
  static std::vector<std::string> kept(const auto& options) {
    if (options.amsgrad()) return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
    return {"exp_avg", "exp_avg_sq"};
  }
};

struct Adam : AnyAdam<torch::optim::Adam, torch::optim::AdamParamState, torch::optim::AdamOptions> {
  static constexpr auto kName = "Adam";
};

struct AdamW : AnyAdam<torch::optim::AdamW, torch::optim::AdamWParamState, torch::optim::AdamWOptions> {
  static constexpr auto kName = "AdamW";
};

struct Sgd : Types<torch::optim::SGD, torch::optim::SGDParamState, torch::optim::SGDOptions> {
  static constexpr auto kName = "SGD";
  static void state(auto& state, const auto& visit) {
    visit("momentum_buffer", state.momentum_buffer());
  }
  static void options(auto& options, const auto& visit) {
    visit("lr", options.lr());
    visit("momentum", options.momentum());
    visit("dampening", options.dampening());
    visit("weight_decay", options.weight_decay());
    visit("nesterov", options.nesterov());
  }
  static std::vector<std::string> kept(const Options& options) {
    if (options.momentum() != 0) return {"momentum_buffer"};
    return {};
  }
};

struct Adagrad : Types<torch::optim::Adagrad, torch::optim::AdagradParamState, torch::optim::AdagradOptions> {
  static constexpr auto kName = "Adagrad";
  static constexpr bool kBeginsWithState = true;
  static void state(auto& state, const auto& visit) {
    visit("step", state.step());
    visit("sum", state.sum());
  }
  static void options(auto& options, const auto& visit) {
    visit("lr", options.lr());
    visit("lr_decay", options.lr_decay());
    visit("eps", options.eps());
    visit("weight_decay", options.weight_decay());
    visit("initial_accumulator_value", options.initial_accumulator_value());
  }
  static std::vector<std::string> kept(const Options& /*options*/) {
    return {"sum"};
  }
};

struct RmsProp : Types<torch::optim::RMSprop, torch::optim::RMSpropParamState, torch::optim::RMSpropOptions> {
  static constexpr auto kName = "RMSprop";
  static void state(auto& state, const auto& visit) {
    visit("step", state.step());
    visit("square_avg", state.square_avg());
    visit("momentum_buffer", state.momentum_buffer());
    visit("grad_avg", state.grad_avg());
  }
  static void options(auto& options, const auto& visit) {
    visit("lr", options.lr());
    visit("momentum", options.momentum());
    visit("alpha", options.alpha());
    visit("eps", options.eps());
    visit("centered", options.centered());
    visit("weight_decay", options.weight_decay());
  }
  static std::vector<std::string> kept(const Options& options) {
    std::vector<std::string> names{"square_avg"};
    if (options.momentum() > 0) names.emplace_back("momentum_buffer");
    if (options.centered()) names.emplace_back("grad_avg");
    return names;
  }
};

at::Tensor as_tensor(double value, at::ScalarType dtype = at::kDouble) {
  return at::scalar_tensor(value, base::on_host(dtype));
}

at::Tensor as_tensor(bool value) {
  return at::scalar_tensor(value, base::on_host(at::kBool));
}

at::Tensor as_tensor(const std::tuple<double, double>& values) {
  return at::tensor({std::get<0>(values), std::get<1>(values)}, base::on_host(at::kDouble));
}

void take(double& value, const at::Tensor& tensor) {
  value = tensor.item<double>();
}

void take(bool& value, const at::Tensor& tensor) {
  value = tensor.item<bool>();
}

void take(std::tuple<double, double>& values, const at::Tensor& tensor) {
  values = {tensor.select(0, 0).item<double>(), tensor.select(0, 1).item<double>()};
}

/// Puts the members of a state into a ParameterState.
struct Reader {
  ParameterState& into;
  bool all = false;
  void operator()(const char* name, const at::Tensor& tensor) const {
    if (all || tensor.defined()) into.tensors.insert(name, tensor);
  }
  // PyTorch's optimizers count in single precision.
  void operator()(const char* name, int64_t number) const {
    into.numbers.insert(name, as_tensor(static_cast<double>(number), at::kFloat));
  }
};

struct Writer {
  const ParameterState& from;
  void operator()(const char* name, at::Tensor& tensor) const {
    if (const auto* value = from.tensors.find(name)) tensor = *value;
  }
  void operator()(const char* name, int64_t& number) const {
    if (const auto* value = from.numbers.find(name)) number = static_cast<int64_t>(value->item<double>());
  }
};

template <typename Class>
class ClassOf final : public OptimizerClass {
 public:
  std::string name() const override {
    return Class::kName;
  }

  bool made(const OptimizerParamState& state) const override {
    return dynamic_cast<const State*>(&state) != nullptr;
  }

  ParameterState read(const OptimizerParamState& state) const override {
    const base::ComputeGuard guard;
    ParameterState read;
    Class::state(static_cast<const State&>(state), Reader{read});
    return read;
  }

  std::unique_ptr<OptimizerParamState> make(const ParameterState& values) const override {
    const base::ComputeGuard guard;
    auto state = std::make_unique<State>();
    Class::state(*state, Writer{values});
    return state;
  }

  ParameterState possible() const override {
    const base::ComputeGuard guard;
    ParameterState names;
    const State none;
    Class::state(none, Reader{names, /*all=*/true});
    return names;
  }

  bool begins_with_state() const override {
    return Class::kBeginsWithState;
  }

  std::vector<std::string> kept(const OptimizerOptions& options) const override {
    return Class::kept(static_cast<const Options&>(options));
  }

  StateDict read(const OptimizerOptions& options) const override {
    const base::ComputeGuard guard;
    StateDict read;
    Class::options(static_cast<const Options&>(options), [&](const char* name, const auto& value) {
      read.insert(name, as_tensor(value));
    });
    return read;
  }

  void write(OptimizerOptions& options, const StateDict& values) const override {
    const base::ComputeGuard guard;
    Class::options(static_cast<Options&>(options), [&](const char* name, auto& value) {
      if (const auto* given = values.find(name)) take(value, *given);
    });
  }

 private:
  using State = typename Class::State;
  using Options = typename Class::Options;
};

template <typename Class>
const OptimizerClass* class_if(const torch::optim::Optimizer& optimizer) {
  static const ClassOf<Class> one;
  return dynamic_cast<const typename Class::Optimizer*>(&optimizer) == nullptr ? nullptr : &one;
}

} // namespace

const OptimizerClass& OptimizerClass::of(const torch::optim::Optimizer& optimizer) {
  for (const auto* one :
       {class_if<AdamW>(optimizer), class_if<Adam>(optimizer), class_if<Sgd>(optimizer), class_if<Adagrad>(optimizer),
        class_if<RmsProp>(optimizer)}) {
    if (one != nullptr) return *one;
  }
  if (dynamic_cast<const torch::optim::LBFGS*>(&optimizer) != nullptr) {
    throw ValueError(
        "shardwise: torch::optim::LBFGS keeps vectors over all parameters of a rank, and nothing for a single one, so "
        "its state cannot be taken parameter by parameter. Use SGD, Adam, AdamW, Adagrad or RMSprop.");
  }
  throw ValueError(
      "shardwise: the class of this optimizer is not torch::optim's SGD, Adam, AdamW, Adagrad or RMSprop, and does not "
      "derive from one of them, so its state is unknown. Derive it from one of them, or save its state yourself.");
}

std::string place_of(const torch::optim::Optimizer& optimizer, const at::Tensor& parameter) {
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const auto& parameters = optimizer.param_groups()[group].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].is_same(parameter)) return c10::str("parameter ", i, " of group ", group);
    }
  }
  return "";
}

} // namespace shardwise::optim
