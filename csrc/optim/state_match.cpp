#include "optim/state_match.h"

#include "base/compute_guard.h"
#include "group/leaf_storage.h"

#include <ATen/ops/equal.h>
#include <c10/util/StringUtil.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <map>

namespace shardwise::optim {
namespace {

std::string why_not(const StateItem& item, const NamedParameter& parameter, const at::Tensor& value) {
  if (!value.defined()) return "is undefined in the dict";
  if (value.layout() != at::kStrided || value.is_meta()) return "is not a dense tensor with values in the dict";
  if (group::is_freed(value)) return "is the full copy of a sharded parameter in the dict, and its memory is freed";
  if (value.is_complex()) return "has complex numbers in the dict";
  if (item.kind == StateItem::Kind::tensor) {
    if (value.sizes() == parameter.entry.sizes) return "";
    return c10::str("has shape ", at::IntArrayRef(parameter.entry.sizes), " here and ", value.sizes(), " in the dict");
  }
  if (value.numel() == item.numel) return "";
  return c10::str("has ", item.numel, " numbers here and ", value.numel(), " in the dict");
}

/// Compares the dict with all that there may be, and collects what it finds.
class Matching {
 public:
  Matching(const OptimizerState& optimizer, const StateDict& dict) : optimizer_(optimizer), dict_(dict) {}

  void add(const NamedParameter& parameter) {
    const auto items = items_of(parameter, optimizer_);
    StateDict options;
    for (const auto& item : items) {
      if (item.kind == StateItem::Kind::option) add_option(item, parameter, options);
    }
    const auto kept = optimizer_.kept(parameter.group, options);
    std::vector<std::string> missing;
    size_t found = 0;
    for (const auto& item : items) {
      if (item.kind == StateItem::Kind::option) continue;
      found += find(item, parameter) != nullptr ? 1 : 0;
      const bool is_needed =
          item.kind == StateItem::Kind::number || std::find(kept.begin(), kept.end(), item.name) != kept.end();
      if (is_needed && !known_.contains(item.key)) missing.push_back(item.key);
    }
    // What was saved before the parameter's first step has options, but no state.
    if (found == 0 && !optimizer_.kind().begins_with_state()) return;
    for (const auto& key : missing) {
      found == 0 ? match.missing.push_back(key)
                 : match.wrong.push_back(c10::str("'", key, "' is missing beside the rest of its parameter's state"));
    }
  }

  StateMatch take() {
    for (const auto& item : dict_) {
      if (!known_.contains(item.key())) match.unexpected.push_back(item.key());
    }
    return std::move(match);
  }

 private:
  /// Its value in the dict, if it has one that fits.
  const at::Tensor* find(const StateItem& item, const NamedParameter& parameter) {
    const auto* value = dict_.find(item.key);
    if (value == nullptr) return nullptr;
    known_.insert(item.key);
    const auto reason = why_not(item, parameter, *value);
    if (reason.empty()) {
      match.keys.push_back(item.key);
      return value;
    }
    match.wrong.push_back(c10::str("'", item.key, "' ", reason));
    return nullptr;
  }

  void add_option(const StateItem& item, const NamedParameter& parameter, StateDict& options) {
    const auto* value = find(item, parameter);
    if (value == nullptr) {
      if (!known_.contains(item.key)) match.missing.push_back(item.key);
      return;
    }
    options.insert(item.name, *value);
    const base::ComputeGuard guard;
    const auto [first, is_first] = options_.try_emplace({parameter.group, item.name}, item.key, *value);
    const auto& [key, other] = first->second;
    if (is_first || at::equal(value->cpu().to(at::kDouble), other.cpu().to(at::kDouble))) return;
    match.wrong.push_back(c10::str(
        "'", item.key, "' and '", key, "' differ in the dict, but both parameters are in group ", parameter.group));
  }

  const OptimizerState& optimizer_;
  const StateDict& dict_;
  std::set<std::string> known_;
  /// By group and name: where it was found first.
  std::map<std::pair<size_t, std::string>, std::pair<std::string, at::Tensor>> options_;
  StateMatch match;
};

} // namespace

std::vector<StateItem> items_of(const NamedParameter& parameter, const OptimizerState& optimizer) {
  using Kind = StateItem::Kind;
  const auto possible = optimizer.kind().possible();
  std::vector<StateItem> items;
  const auto numel = c10::multiply_integers(parameter.entry.sizes);
  for (const auto& item : possible.tensors) {
    items.push_back({Kind::tensor, item.key(), parameter.state_key(item.key()), numel});
  }
  for (const auto& item : possible.numbers) {
    items.push_back({Kind::number, item.key(), parameter.state_key(item.key()), 1});
  }
  for (const auto& item : optimizer.options(parameter.group)) {
    items.push_back({Kind::option, item.key(), parameter.option_key(item.key()), item.value().numel()});
  }
  return items;
}

std::vector<StateItem> items_of(
    const NamedParameter& parameter, const OptimizerState& optimizer, const std::set<std::string>& keys) {
  auto items = items_of(parameter, optimizer);
  std::erase_if(items, [&](const auto& item) { return !keys.contains(item.key); });
  return items;
}

StateMatch match_state(
    const std::vector<NamedParameter>& parameters, const OptimizerState& optimizer, const StateDict& dict) {
  Matching matching(optimizer, dict);
  for (const auto& parameter : parameters) matching.add(parameter);
  return matching.take();
}

// Options first, since they decide which state a parameter must have.
void set_state(
    OptimizerState& optimizer, const std::vector<NamedParameter>& parameters, const std::set<std::string>& keys,
    const StateDict& numbers, const std::function<at::Tensor(const NamedParameter&, const StateItem&)>& tensor_of) {
  using Kind = StateItem::Kind;
  for (const auto& parameter : parameters) {
    StateDict options;
    for (const auto& item : items_of(parameter, optimizer, keys)) {
      if (item.kind == Kind::option) options.insert(item.name, numbers[item.key]);
    }
    optimizer.set_options(parameter.group, options);
  }
  for (const auto& parameter : parameters) {
    ParameterState state;
    const auto items = items_of(parameter, optimizer, keys);
    for (const auto& item : items) {
      if (item.kind == Kind::number) state.numbers.insert(item.name, numbers[item.key]);
      if (item.kind == Kind::tensor) state.tensors.insert(item.name, tensor_of(parameter, item));
    }
    if (!items.empty()) optimizer.set(parameter.entry.tensor, state);
  }
}

} // namespace shardwise::optim
