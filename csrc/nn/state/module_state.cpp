#include "nn/state/module_state.h"

#include "base/compute_guard.h"
#include "base/reason.h"
#include "comm/mesh/gather_texts.h"
#include "nn/touch/touch.h"
#include "nn/wrap/module_walk.h"
#include "nn/wrap/split_axes.h"
#include "split/exchange.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::nn {
namespace {

/// The outermost of these units, one for each set of ranks.
std::vector<std::shared_ptr<engine::Unit>> meshes_of(const std::vector<std::shared_ptr<engine::Unit>>& units) {
  std::vector<std::shared_ptr<engine::Unit>> meshes;
  for (const auto& unit : units) {
    const auto same = [&](const auto& other) { return other->ranks().has_same_ranks(unit->ranks()); };
    if (std::any_of(meshes.begin(), meshes.end(), same)) continue;
    auto top = unit;
    while (top->outer() && top->outer()->ranks().has_same_ranks(unit->ranks())) top = top->outer();
    meshes.push_back(std::move(top));
  }
  return meshes;
}

} // namespace

ModuleState::ModuleState(const torch::nn::Module& module) {
  for_each_tensor(module, [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    const auto [entry, is_new] = index_.try_emplace(tensor.unsafeGetTensorImpl(), entries_.size());
    if (is_new) {
      auto unit = is_parameter ? engine::Unit::of(tensor) : nullptr;
      if (unit && std::find(units_.begin(), units_.end(), unit) == units_.end()) units_.push_back(unit);
      entries_.push_back(
          {.names = {},
           .tensor = tensor,
           .is_parameter = is_parameter,
           .sizes = tensor.sizes().vec(),
           .unit = std::move(unit)});
    }
    entries_[entry->second].names.push_back(name);
    names_.emplace_back(name, entry->second);
  });
  meshes_ = meshes_of(units_);
  find_splits();
}

void ModuleState::find_splits() {
  if (!split::any_split()) return;
  for (auto& entry : entries_) entry.split = split::split_parameter_of(entry.tensor);
  for (const auto& unit : units_) {
    for (const auto& parameter : unit->parameters()) {
      auto* entry = parameter->alive() ? entry_of(parameter->visible()) : nullptr;
      if (entry != nullptr) entry->split = split::split_parameter_of(parameter->leaf());
    }
  }
  for (auto& entry : entries_) {
    if (!entry.split) continue;
    entry.sizes = entry.split->sizes;
    add_axis(axes_, entry.split->axis);
  }
}

ModuleState::Entry* ModuleState::entry_of(const at::Tensor& tensor) {
  const auto found = index_.find(tensor.unsafeGetTensorImpl());
  return found == index_.end() ? nullptr : &entries_[found->second];
}

at::Tensor ModuleState::Entry::piece_of(const at::Tensor& whole) const {
  if (!split) return whole;
  return split::Exchange(split).own(whole, split->dim, split->pieces);
}

at::Tensor ModuleState::Entry::whole_of(const at::Tensor& piece, std::optional<at::Device> device) const {
  if (!is_split()) return piece;
  const base::ComputeGuard guard;
  const auto there = piece.to(split->axis->mesh.device());
  const auto whole = split::Exchange(split).gather(there, split->dim, split->pieces, "the gather of the whole");
  return whole.to(device.value_or(piece.device())).contiguous();
}

int64_t ModuleState::rank() const {
  if (!axes_.empty()) return axes_.front()->mesh.rank();
  return meshes_.empty() ? 0 : meshes_.front()->mesh().rank();
}

bool ModuleState::is_first_in_units() const {
  return std::all_of(meshes_.begin(), meshes_.end(), [](auto& unit) { return unit->mesh().rank() == 0; });
}

bool ModuleState::is_first() const {
  return is_first_in_units() && std::all_of(axes_.begin(), axes_.end(), [](auto& axis) { return axis->rank() == 0; });
}

std::string ModuleState::locate() {
  std::vector<std::string> without_values;
  for (const auto& entry : entries_) {
    if (entry.tensor.is_meta()) without_values.push_back(entry.names.front());
  }
  if (!without_values.empty()) {
    const auto rank = meshes_.empty() ? std::nullopt : std::optional(meshes_.front()->mesh().rank());
    return engine::still_on_meta(rank, without_values);
  }
  try {
    for (const auto& unit : units_) {
      unit->schedule()->follow_optimizer();
      unit->renew_groups();
      for (const auto& group : unit->groups()) {
        auto* copies = group->full_copies();
        if (copies == nullptr) continue;
        for (size_t i = 0; i < group->parameters().size(); ++i) {
          const auto& parameter = *group->parameters()[i];
          auto* entry = entry_of(parameter.visible());
          if (entry == nullptr) continue;
          entry->copies = copies;
          entry->index = i;
          if (!entry->split) entry->sizes = parameter.leaf().sizes().vec();
        }
      }
    }
    for (const auto& entry : entries_) {
      const bool is_known = entry.unit || entry.copies != nullptr || entry.split;
      if (is_known || !has_touch_key(entry.tensor)) continue;
      return c10::str(
          "shardwise: the parameter '", entry.names.front(),
          "' is a shard whose unit is gone: the module's member was assigned to after fully_shard(). Assign before "
          "fully_shard(), or change parameters in place.");
    }
  } catch (const std::exception& error) {
    return base::text_of(error);
  }
  return "";
}

std::string ModuleState::describe(const std::string& function) const {
  if (names_.empty()) return function + " of a module without tensors";
  return c10::str(
      function, " of ", names_.size(), " names, '", names_.front().first, "' to '", names_.back().first, "'");
}

void ModuleState::agree(const std::string& function, const std::string& error) const {
  const std::string mark = "!";
  auto mine = error.empty() ? describe(function) : mark + error;
  std::string difference;
  const auto compare = [&](const std::vector<std::string>& texts) {
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      if (texts[rank].starts_with(mark)) {
        // Passed on, so that the ranks of later meshes hear of it too.
        mine = texts[rank];
        break;
      }
      if (texts[rank] != texts[0] && difference.empty()) {
        difference = c10::str(
            "shardwise: rank 0 calls ", texts[0], ", but rank ", rank, " calls ", texts[rank],
            ". All ranks must call the same function for the same module.");
      }
    }
  };
  const auto what = "the exchange before a " + function;
  for (const auto& unit : meshes_) {
    unit->ranks().compare_now(comm::Agreement::kState, describe(function), unit->own_counters());
    compare(comm::gather_texts(mine, unit->ranks().axes(), unit->mesh().device(), what, unit->own_counters()));
  }
  for (const auto& axis : axes_) {
    compare(comm::gather_texts(mine, {axis->ranks}, axis->mesh.device(), what, axis->counters));
  }
  if (mine.starts_with(mark)) throw Error(mine.substr(mark.size()));
  if (!difference.empty()) throw Error(difference);
}

} // namespace shardwise::nn
