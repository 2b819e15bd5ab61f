#include <shardwise/state_dict.h>

#include "base/compute_guard.h"
#include "base/fingerprint.h"
#include "base/reason.h"
#include "optim/optimizer_state.h"

#include <c10/util/StringUtil.h>

#include <map>
#include <set>

namespace shardwise {
namespace {

using optim::NamedParameter;
using optim::ParameterState;

/// The parameters of an optimizer with their state.
struct Kept {
  std::vector<NamedParameter> parameters;
  std::vector<ParameterState> states;
};

std::string find(const optim::OptimizerState& optimizer, Kept& kept) {
  try {
    for (const auto& parameter : kept.parameters) {
      const auto& tensor = parameter.entry.tensor;
      kept.states.push_back(optimizer.get(tensor));
      for (const auto& item : kept.states.back().tensors) {
        if (item.value().sizes() == tensor.sizes()) continue;
        return c10::str(
            "shardwise: '", item.key(), "' that ", optimizer.name(), " keeps for '", parameter.name(), "' has sizes ",
            item.value().sizes(), ", but the parameter has ", tensor.sizes(),
            " on this rank. Load state of this shard.");
      }
    }
  } catch (const std::exception& error) {
    return base::text_of(error);
  }
  return optim::without_name(kept.parameters, optimizer);
}

/// The same on ranks whose optimizers have the same kinds of state.
std::string describe(const Kept& kept, const std::string& optimizer) {
  std::string all;
  size_t tensors = 0;
  for (size_t i = 0; i < kept.states.size(); ++i) {
    for (const auto& item : kept.states[i].tensors) {
      all += c10::str(kept.parameters[i].state_key(item.key()), item.value().scalar_type(), ';');
      ++tensors;
    }
  }
  return c10::str(
      "full_optimizer_state_dict (", optimizer, ", which keeps ", tensors, " tensors, fingerprint ",
      base::fingerprint(all), ")");
}

/// Whole tensors, a name of each parameter.
using Whole = std::vector<std::map<std::string, at::Tensor>>;

/// Gathers one kind of tensor, such as exp_avg, for the sharded parameters of a group.
void gather(
    engine::Unit& unit, group::Group& group, const std::string& name, const Kept& kept, bool keep,
    std::optional<at::Device> device, Whole& whole) {
  const auto& copies = *group.full_copies();
  std::vector<at::Tensor> pieces(group.parameters().size());
  std::vector<size_t> owner(pieces.size());
  for (size_t i = 0; i < kept.parameters.size(); ++i) {
    const auto& entry = kept.parameters[i].entry;
    const auto* tensor = entry.copies == &copies ? kept.states[i].tensors.find(name) : nullptr;
    if (tensor == nullptr) continue;
    pieces[entry.index] = *tensor;
    owner[entry.index] = i;
  }
  const auto values =
      copies.gather_pieces(pieces, keep, device, unit.shards(), unit.buffers(), unit.name(), unit.own_counters());
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].defined()) whole[owner[i]][name] = values[i];
  }
}

/// The same on all ranks, in the same order.
std::set<std::string> names_in(const Kept& kept, const group::FullCopies& copies) {
  std::set<std::string> names;
  for (size_t i = 0; i < kept.parameters.size(); ++i) {
    if (kept.parameters[i].entry.copies != &copies) continue;
    for (const auto& item : kept.states[i].tensors) names.insert(item.key());
  }
  return names;
}

} // namespace

StateDict full_optimizer_state_dict(
    const torch::nn::Module& module, torch::optim::Optimizer& optimizer, const FullStateDictOptions& options) {
  const optim::OptimizerState state(optimizer);
  nn::ModuleState places(module);
  auto error = places.locate();
  Kept kept{.parameters = optim::named_parameters(places, state), .states = {}};
  if (const auto other = find(state, kept); error.empty()) error = other;
  places.agree(describe(kept, state.name()), error);
  // Ranks along an axis of parallelize() need each other's pieces.
  const bool gathers = !options.rank0_only() || places.is_first_in_units();
  const bool keep = !options.rank0_only() || places.is_first();
  const auto device = options.cpu_offload() ? std::optional<at::Device>(at::kCPU) : std::nullopt;
  Whole whole(kept.parameters.size());
  for (const auto& unit : places.units()) {
    for (const auto& group : unit->groups()) {
      const auto* copies = group->full_copies();
      if (copies == nullptr) continue;
      for (const auto& name : names_in(kept, *copies)) gather(*unit, *group, name, kept, gathers, device, whole);
    }
  }
  for (size_t i = 0; i < kept.parameters.size() && gathers; ++i) {
    const auto& entry = kept.parameters[i].entry;
    if (!entry.is_split()) continue;
    for (const auto& item : kept.states[i].tensors) {
      auto& value = whole[i][item.key()];
      value = entry.whole_of(value.defined() ? value : item.value(), device);
    }
  }
  StateDict dict;
  if (!keep) return dict;
  const base::ComputeGuard guard;
  for (size_t i = 0; i < kept.parameters.size(); ++i) {
    const auto& parameter = kept.parameters[i];
    for (const auto& item : kept.states[i].tensors) {
      auto& value = whole[i][item.key()];
      if (!value.defined()) value = item.value().to(device.value_or(item.value().device()), false, /*copy=*/true);
      dict.insert(parameter.state_key(item.key()), value);
    }
    for (const auto& item : kept.states[i].numbers) dict.insert(parameter.state_key(item.key()), item.value());
  }
  for (const auto& parameter : kept.parameters) {
    for (const auto& item : state.options(parameter.group)) {
      dict.insert(parameter.option_key(item.key()), item.value());
    }
  }
  return dict;
}

} // namespace shardwise
