#pragma once

#include "nn/state/module_state.h"
#include "optim/optimizer_state.h"

#include <string>
#include <vector>

namespace shardwise::optim {

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
