#include "engine/unit.h"

#include "base/compute_guard.h"
#include "engine/still_on_meta.h"
#include "group/data.h"

#include <shardwise/error.h>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::engine {

std::string still_on_meta(std::optional<int64_t> rank, const std::vector<std::string>& names) {
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "'" : ", '") + name + "'";
  return c10::str(
      "shardwise: ", rank ? c10::str("rank ", *rank, ": ") : "",
      "these are still on the meta device, where nothing has values: ", list,
      ". Call shardwise::to_empty(model) after the outermost unit was made, then give them values: initialize them in "
      "with_whole_parameters(), or call load_full_state_dict().");
}

at::Tensor with_memory(const at::Tensor& tensor, at::Device device) {
  const base::ComputeGuard guard;
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
  // They got memory since the groups were made; the next use makes the groups anew.
  if (names.empty()) return;
  throw Error(still_on_meta(mesh_.rank(), names));
}

// Where a module's members and parameters() are the same tensors, they cannot be separated later.
void Unit::need_no_copies() const {
  if (has_full_copies()) return;
  for (const auto& parameter : parameters_) {
    const auto dtype = parameter->stored().scalar_type();
    const auto full = settings_.full_dtype(dtype, parameter->full_dtype);
    if (dtype == full) continue;
    throw Error(c10::str(
        "shardwise: rank ", mesh_.rank(), ": the parameter '", parameter->name(), "' was cast to ",
        c10::getDtypeNames(dtype).first, " after replicate(), but its module computes in ",
        c10::getDtypeNames(full).first,
        " (param_dtype). This needs copies beside the parameters, which replicate() makes only if the dtypes differ "
        "when it is called. Cast the module first, then call replicate()."));
  }
}

void Unit::lend_leaf(const group::Parameter& parameter, const at::Tensor& whole) {
  const base::ComputeGuard guard;
  group::replace_data(parameter.full(), whole);
}

std::string Unit::restore_memory() const {
  std::string lost;
  for (const auto& parameter : parameters_) {
    if (!parameter->lost_memory()) continue;
    if (lost.empty()) lost = parameter->name();
    parameter->restore_memory();
    if (settings_.front_end) settings_.front_end->mark(parameter->full());
  }
  return lost;
}

// The memory is restored before the error is raised, so that the unit can be used again.
void Unit::need_own_memory() const {
  const auto lost = restore_memory();
  if (lost.empty()) return;
  throw Error(c10::str(
      "shardwise: rank ", mesh_.rank(),
      ": a cast, a move or a load of only a part of the wrapped module replaced the memory of the full parameter '",
      lost,
      "'. The optimizer trains another tensor, so the change would have been lost; it was undone. Call reshard() on "
      "the wrapped module before such a change, or cast, move or load the wrapped module itself."));
}

void Unit::provide_memory(const std::vector<at::Tensor>& parameters) {
  for (const auto& tensor : parameters) {
    if (!tensor.is_meta()) continue;
    if (parameter_of_shard(tensor) == nullptr) {
      group::replace_data(tensor, with_memory(tensor, mesh_.device()));
      continue;
    }
    const base::ComputeGuard guard;
    const auto options = tensor.options().device(settings_.offload ? at::Device(at::kCPU) : mesh_.device());
    // An expanded scalar takes no memory of this size; the group copies it into its part.
    group::replace_data(tensor, at::zeros({}, options).expand(tensor.sizes()));
  }
  follow_parameters(/*takes_memory=*/true);
}

} // namespace shardwise::engine
