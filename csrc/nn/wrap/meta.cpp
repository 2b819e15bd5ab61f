#include <shardwise/meta.h>

#include "engine/front_end.h"
#include "group/data.h"
#include "nn/state/module_state.h"
#include "nn/touch/touch.h"
#include "nn/wrap/split_axes.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <map>

namespace shardwise {
namespace {

/// The device of all units of a module, which `asked` must not contradict; without units, `asked`.
at::Device device_of(const torch::nn::Module& module, const nn::ModuleState& state, std::optional<at::Device> asked) {
  for (const auto& unit : state.units()) {
    const auto device = asked.value_or(unit->device());
    if (device == unit->device() || (!device.has_index() && device.type() == unit->device().type())) {
      asked = unit->device();
      continue;
    }
    throw ValueError(c10::str(
        "shardwise: to_empty() of this ", module.name(), " was given the device ", device, ", but its unit '",
        unit->name(), "' is on ", unit->device(), ", the device of ", unit->mesh().describe(),
        ". Leave out the device, or make the mesh on the device that you want."));
  }
  if (!asked) {
    throw ValueError(c10::str(
        "shardwise: to_empty() of this ", module.name(),
        ": it has no units, so no mesh says where it goes. Give a device, or call fully_shard() first."));
  }
  return *asked;
}

} // namespace

detail::MetaMode::MetaMode() : seen_(nn::kTouchKey) {}

void to_empty(torch::nn::Module& module, std::optional<at::Device> device) {
  const nn::ModuleState state(module);
  const auto target = device_of(module, state, device);
  std::map<engine::Unit*, std::vector<at::Tensor>> parameters;
  for (const auto& entry : state.entries()) {
    if (entry.unit) {
      parameters[entry.unit.get()].push_back(entry.tensor);
    } else if (entry.tensor.is_meta()) {
      group::replace_data(entry.tensor, engine::with_memory(entry.tensor, target));
    }
  }
  for (const auto& unit : state.units()) unit->provide_memory(parameters[unit.get()]);
  for (const auto& entry : state.entries()) nn::keep_piece(entry.tensor);
}

} // namespace shardwise
