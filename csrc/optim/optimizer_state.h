#pragma once

#include "nn/state/module_state.h"
#include "optim/optimizer_class.h"

#include <shardwise/detail/export.h>

#include <optional>
#include <string>
#include <vector>

namespace shardwise::optim {

/// The state of an optimizer of torch::optim for each parameter, and the options of its groups, by name: read and set
/// without knowing its class. For SGD, Adam, AdamW, Adagrad, RMSprop, and classes derived from them.
class SHARDWISE_API OptimizerState {
 public:
  /// Refers to the optimizer. Raises ValueError for optimizers of other classes.
  explicit OptimizerState(torch::optim::Optimizer& optimizer);

  /// Its class.
  const OptimizerClass& kind() const {
    return class_;
  }
  std::string name() const {
    return class_.name();
  }
  size_t groups() const {
    return optimizer_.param_groups().size();
  }
  const std::vector<at::Tensor>& parameters(size_t group) const {
    return optimizer_.param_groups()[group].params();
  }

  /// The state of a parameter: the optimizer's own tensors. Raises Error if the state has a class of the program's.
  ParameterState get(const at::Tensor& parameter) const;
  /// Sets the state of a parameter to copies of these values, in the parameter's dtype and on its device. Without
  /// values the parameter has no state afterwards. Raises ValueError for names or sizes that do not fit, or if one is
  /// missing.
  void set(const at::Tensor& parameter, const ParameterState& state);
  /// The names of the tensors in the state of each parameter of this group that it has changed. `changed` are options
  /// to assume in place of its own.
  std::vector<std::string> kept(size_t group, const StateDict& changed = StateDict()) const;

  /// Which of its parameters this is, for errors.
  std::string describe(const at::Tensor& parameter) const;

  /// The options of a group, as tensors on the host: of doubles or bools, with two elements for `betas`, else without
  /// dimensions.
  StateDict options(size_t group) const;
  /// Sets some options of a group. Raises ValueError for names that its class does not have, and for wrong numbers of
  /// elements.
  void set_options(size_t group, const StateDict& options);

 private:
  /// The group that has this parameter; nullopt if none has.
  std::optional<size_t> group_of(const at::Tensor& parameter) const;
  void check(const at::Tensor& parameter, const ParameterState& state) const;

  torch::optim::Optimizer& optimizer_;
  const OptimizerClass& class_;
};

/// A parameter of an optimizer, as a module has it.
struct NamedParameter {
  const nn::ModuleState::Entry& entry;
  size_t group;

  const std::string& name() const {
    return entry.names.front();
  }
  std::string state_key(const std::string& of) const {
    return "state." + name() + "." + of;
  }
  std::string option_key(const std::string& of) const {
    return "param_groups." + name() + "." + of;
  }
};

/// The parameters that both have, in the order of the module. `module` must outlive them.
std::vector<NamedParameter> named_parameters(const nn::ModuleState& module, const OptimizerState& optimizer);

/// What is wrong if the optimizer has parameters that the module does not have; "" if it has none.
std::string without_name(const std::vector<NamedParameter>& named, const OptimizerState& optimizer);

} // namespace shardwise::optim
