#include "engine/unit.h"

#include "engine/still_on_meta.h"
#include "group/compute_guard.h"
#include "group/data.h"

#include <shardwise/error.h>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::engine {

std::string still_on_meta(int64_t rank, const std::vector<std::string>& names) {
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "'" : ", '") + name + "'";
  return c10::str(
      "shardwise: rank ", rank, ": these are still on the meta device, where nothing has values: ", list,
      ". Call shardwise::to_empty(model) after the outermost unit was made, then give them values: write to "
      "parameters() and buffers(), or call load_full_state_dict().");
}

at::Tensor with_memory(const at::Tensor& tensor, at::Device device) {
  const group::ComputeGuard guard;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device)).zero_();
}

void Unit::need_values() const {
  const auto on_meta = [](const auto& group) { return group->on_meta(); };
  if (std::none_of(groups_.begin(), groups_.end(), on_meta)) return;
  std::vector<std::string> names;
  for (const auto& unit : schedule_->units()) {
    for (const auto& parameter : unit->parameters_) {
      if (parameter->stored().is_meta()) names.push_back(parameter->name());
    }
  }
  // Memory came since the groups were made; whoever uses them makes them anew.
  if (names.empty()) return;
  throw Error(still_on_meta(mesh_.rank(), names));
}

void Unit::provide_memory(const std::vector<at::Tensor>& parameters) {
  for (const auto& tensor : parameters) {
    if (!tensor.is_meta()) continue;
    if (parameter_of_shard(tensor) == nullptr) {
      group::replace_data(tensor, with_memory(tensor, mesh_.device()));
      continue;
    }
    const group::ComputeGuard guard;
    const auto options = tensor.options().device(settings_.offload ? at::Device(at::kCPU) : mesh_.device());
    // Without memory of its own: the group copies it into its part.
    group::replace_data(tensor, at::zeros({}, options).expand(tensor.sizes()));
  }
  follow_parameters(/*takes_memory=*/true);
}

} // namespace shardwise::engine
