#include "optim/optimizer_state.h"

#include "base/compute_guard.h"
#include "nn/wrap/module_walk.h"
#include "optim/counted_state.h"

#include <shardwise/error.h>

#include <ATen/ops/empty_like.h>
#include <c10/util/StringUtil.h>

#include <unordered_map>
#include <unordered_set>

namespace shardwise::optim {
namespace {

/// Raises ValueError for names that are not `known`.
void refuse_unknown(const StateDict& given, const StateDict& known, const std::string& what) {
  for (const auto& item : given) {
    if (known.contains(item.key())) continue;
    throw ValueError(c10::str(
        "shardwise: ", what, " has no '", item.key(), "', but ", c10::Join(", ", known.keys()),
        ". Give what an optimizer of the same class kept."));
  }
}

} // namespace

OptimizerState::OptimizerState(torch::optim::Optimizer& optimizer)
    : optimizer_(optimizer),
      class_(OptimizerClass::of(optimizer)) {}

std::optional<size_t> OptimizerState::group_of(const at::Tensor& parameter) const {
  for (size_t group = 0; group < groups(); ++group) {
    if (nn::is_among(parameters(group), parameter)) return group;
  }
  return std::nullopt;
}

std::string OptimizerState::describe(const at::Tensor& parameter) const {
  const auto place = place_of(optimizer_, parameter);
  return place.empty() ? "a tensor that is not one of its parameters" : place;
}

ParameterState OptimizerState::get(const at::Tensor& parameter) const {
  const auto& all = optimizer_.state();
  const auto found = all.find(parameter.unsafeGetTensorImpl());
  if (found == all.end() || !found->second) return {};
  if (!class_.made(*found->second)) {
    throw Error(c10::str(
        "shardwise: what this ", name(), " keeps for ", describe(parameter), " is not of torch::optim's class ", name(),
        "ParamState, so its names are unknown. Derive the state's class from that, or save it yourself."));
  }
  if (auto* count = dynamic_cast<StepCount*>(found->second.get())) count->sync_from_device();
  return class_.read(*found->second);
}

void OptimizerState::check(const at::Tensor& parameter, const ParameterState& state) const {
  const auto group = group_of(parameter);
  const auto what = c10::str("the state of ", describe(parameter), " of ", name());
  if (!group) throw ValueError(c10::str("shardwise: ", what, " was given. Make the optimizer with all parameters."));
  const auto possible = class_.possible();
  refuse_unknown(state.tensors, possible.tensors, what);
  refuse_unknown(state.numbers, possible.numbers, what);
  auto needed = kept(*group);
  for (const auto& number : possible.numbers) needed.push_back(number.key());
  for (const auto& one : needed) {
    if (state.tensors.contains(one) || state.numbers.contains(one)) continue;
    throw ValueError(c10::str(
        "shardwise: ", what, " needs '", one,
        "', which is missing. Give all that an optimizer with the same options kept: ", c10::Join(", ", needed), "."));
  }
  for (const auto& item : state.tensors) {
    if (item.value().sizes() == parameter.sizes()) continue;
    throw ValueError(c10::str(
        "shardwise: '", item.key(), "' in ", what, " has sizes ", item.value().sizes(), ", but the parameter has ",
        parameter.sizes(), ". Give what an optimizer kept for a parameter of the same sizes."));
  }
  for (const auto& item : state.numbers) {
    if (item.value().numel() == 1) continue;
    throw ValueError(c10::str(
        "shardwise: '", item.key(), "' in ", what, " has sizes ", item.value().sizes(), ". It must be one number."));
  }
}

void OptimizerState::set(const at::Tensor& parameter, const ParameterState& state) {
  if (state.is_empty() && !class_.begins_with_state()) {
    optimizer_.state().erase(parameter.unsafeGetTensorImpl());
    return;
  }
  check(parameter, state);
  const base::ComputeGuard guard;
  ParameterState own;
  for (const auto& item : state.tensors) {
    own.tensors.insert(item.key(), at::empty_like(parameter).copy_(item.value()));
  }
  own.numbers = state.numbers;
  optimizer_.state()[parameter.unsafeGetTensorImpl()] = class_.make(own);
}

std::vector<std::string> OptimizerState::kept(size_t group, const StateDict& changed) const {
  const auto options = optimizer_.param_groups()[group].options().clone();
  class_.write(*options, changed);
  return class_.kept(*options);
}

StateDict OptimizerState::options(size_t group) const {
  return class_.read(optimizer_.param_groups()[group].options());
}

void OptimizerState::set_options(size_t group, const StateDict& options) {
  const auto what = c10::str("group ", group, " of ", name());
  const auto known = this->options(group);
  refuse_unknown(options, known, what);
  for (const auto& item : options) {
    if (item.value().numel() == known[item.key()].numel()) continue;
    throw ValueError(c10::str(
        "shardwise: '", item.key(), "' of ", what, " was given ", item.value().numel(), " numbers; it has ",
        known[item.key()].numel(), "."));
  }
  class_.write(optimizer_.param_groups()[group].options(), options);
}

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
    for (const auto& parameter : optimizer.parameters(group)) {
      if (known.contains(parameter.unsafeGetTensorImpl())) continue;
      return c10::str(
          "shardwise: ", optimizer.describe(parameter), " of this ", optimizer.name(),
          " is not a parameter of the module, so it has no name there. Give the module whose parameters() the "
          "optimizer was made with, after fully_shard() or replicate().");
    }
  }
  return "";
}

} // namespace shardwise::optim
