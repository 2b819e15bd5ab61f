#pragma once

#include "optim/optimizer_state.h"

#include <functional>
#include <set>
#include <string>
#include <vector>

namespace shardwise::optim {

/// A value of a dict that an optimizer can take for one of its parameters.
struct StateItem {
  enum class Kind : uint8_t { tensor, number, option };
  Kind kind;
  /// As in torch's state dicts: exp_avg.
  std::string name;
  /// In the dict: state.blocks.0.weight.exp_avg.
  std::string key;
  /// How many elements; of a tensor, those of the whole parameter.
  int64_t numel;
};

/// All values that a parameter may have; the same on all ranks.
std::vector<StateItem> items_of(const NamedParameter& parameter, const OptimizerState& optimizer);
/// The same, of those with these keys.
std::vector<StateItem> items_of(
    const NamedParameter& parameter, const OptimizerState& optimizer, const std::set<std::string>& keys);

/// How a dict fits an optimizer.
struct StateMatch {
  /// The keys to load.
  std::vector<std::string> keys;
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  /// What is wrong with others, one line each.
  std::vector<std::string> wrong;
};

StateMatch match_state(
    const std::vector<NamedParameter>& parameters, const OptimizerState& optimizer, const StateDict& dict);

/// Sets the items with these keys: numbers and options as `numbers` has them, tensors as `tensor_of` gives this rank's
/// piece of them.
void set_state(
    OptimizerState& optimizer, const std::vector<NamedParameter>& parameters, const std::set<std::string>& keys,
    const StateDict& numbers, const std::function<at::Tensor(const NamedParameter&, const StateItem&)>& tensor_of);

} // namespace shardwise::optim
