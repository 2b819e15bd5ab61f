#include <shardwise/state_dict.h>

#include "base/compute_guard.h"
#include "nn/state/module_state.h"

namespace shardwise {
namespace {

/// Gathers the sharded values of one group, and puts them at the places of their entries.
void gather(
    engine::Unit& unit, group::Group& group, const nn::ModuleState& state, bool keep, std::optional<at::Device> device,
    std::vector<at::Tensor>& values) {
  std::vector<bool> wanted(group.parameters().size(), false);
  std::vector<size_t> entry_of(wanted.size());
  bool any = false;
  for (size_t i = 0; i < state.entries().size(); ++i) {
    const auto& entry = state.entries()[i];
    if (entry.copies == nullptr || entry.copies != group.full_copies()) continue;
    any = true;
    wanted[entry.index] = keep;
    entry_of[entry.index] = i;
  }
  if (!any) return;
  const auto whole = group.full_copies()->gather_values(
      wanted, device, unit.shards(), unit.buffers(), unit.name(), unit.own_counters());
  for (size_t i = 0; i < whole.size(); ++i) {
    if (whole[i].defined()) values[entry_of[i]] = whole[i];
  }
}

} // namespace

StateDict full_state_dict(const torch::nn::Module& module, const FullStateDictOptions& options) {
  nn::ModuleState state(module);
  state.agree("full_state_dict", state.locate());
  // Ranks along an axis of parallelize() need each other's pieces.
  const bool gathers = !options.rank0_only() || state.is_first_in_units();
  const bool keep = !options.rank0_only() || state.is_first();
  const auto device = options.cpu_offload() ? std::optional<at::Device>(at::kCPU) : std::nullopt;
  std::vector<at::Tensor> values(state.entries().size());
  for (const auto& unit : state.units()) {
    for (const auto& group : unit->groups()) gather(*unit, *group, state, gathers, device, values);
  }
  for (size_t i = 0; i < values.size() && gathers; ++i) {
    const auto& entry = state.entries()[i];
    if (entry.is_split()) values[i] = entry.whole_of(values[i].defined() ? values[i] : entry.tensor, device);
  }
  StateDict dict;
  if (!keep) return dict;
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].defined()) continue;
    const base::ComputeGuard guard;
    const auto& tensor = state.entries()[i].tensor;
    values[i] = device && tensor.device() != *device ? tensor.to(*device) : tensor.clone();
  }
  for (const auto& [name, index] : state.names()) dict.insert(name, values[index]);
  return dict;
}

} // namespace shardwise
