#include "optim/named_parameters.h"

#include <c10/util/StringUtil.h>

#include <unordered_map>
#include <unordered_set>

namespace shardwise::optim {

std::vector<NamedParameter> named_parameters(const nn::ModuleState& module, const OptimizerState& optimizer) {
  std::unordered_map<const at::TensorImpl*, size_t> groups;
  for (size_t group = 0; group < optimizer.groups(); ++group) {
    for (const auto& parameter : optimizer.parameters(group)) groups.emplace(parameter.unsafeGetTensorImpl(), group);
  }
  std::vector<NamedParameter> named;
  for (const auto& entry : module.entries()) {
    const auto found = groups.find(entry.tensor.unsafeGetTensorImpl());
    if (found != groups.end()) named.push_back({entry, found->second});
  }
  return named;
}

std::string without_name(const std::vector<NamedParameter>& named, const OptimizerState& optimizer) {
  std::unordered_set<const at::TensorImpl*> known;
  for (const auto& parameter : named) known.insert(parameter.entry.tensor.unsafeGetTensorImpl());
  for (size_t group = 0; group < optimizer.groups(); ++group) {
    const auto& parameters = optimizer.parameters(group);
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (known.contains(parameters[i].unsafeGetTensorImpl())) continue;
      return c10::str(
          "shardwise: parameter ", i, " of group ", group, " of this ", optimizer.name(),
          " is none of the module's, so it has no name there. Give the module whose parameters() the optimizer was "
          "made with, after fully_shard() or replicate().");
    }
  }
  return "";
}

} // namespace shardwise::optim
