#include "nn/wrap/wrapping.h"

#include "base/compute_guard.h"
#include "nn/hooks/hook_table.h"
#include "nn/hooks/unit_hooks.h"
#include "nn/touch/recurrent.h"
#include "nn/touch/unit_touch.h"
#include "nn/wrap/aliases.h"
#include "nn/wrap/module_walk.h"
#include "nn/wrap/owners.h"
#include "nn/wrap/split_axes.h"
#include "nn/wrap/unit_table.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace shardwise::nn {
namespace {

// Made for every forward and backward. apply() copies no list of modules.
uint64_t fingerprint(const torch::nn::Module& module) {
  uint64_t sum = 0;
  module.apply([&](const torch::nn::Module& part) {
    for (const auto& parameter : ModuleParts::of(part)) {
      const auto& tensor = parameter.value();
      sum = sum * 31 + reinterpret_cast<uintptr_t>(tensor.unsafeGetTensorImpl());
      sum = sum * 31 + (tensor.defined() && tensor.requires_grad() ? 1 : 0);
    }
  });
  return sum;
}

/// Notices parameters that were registered with wrapped modules later: no unit would average their gradients. Owns no
/// module.
class LaterParameters {
 public:
  /// Made when the modules have been wrapped and have hooks. What is in no unit now was left out on purpose.
  LaterParameters(const std::vector<torch::nn::Module*>& modules, std::string function)
      : function_(std::move(function)) {
    for (auto* module : modules) {
      wrapped_.push_back({module, HookTable::get().life(*module)});
      for (const auto& parameter : walk(*module).parameters) {
        if (!engine::Unit::of(parameter.tensor)) left_out_.emplace_back(parameter.tensor.getIntrusivePtr());
      }
    }
  }

  /// Raises Error if there is one that needs a gradient and has no unit.
  void refuse(int64_t rank) {
    for (auto& [module, life, known] : wrapped_) {
      if (life.expired()) continue;
      const auto now = fingerprint(*module);
      if (now == known) continue;
      for_each_tensor(*module, [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
        const auto is_same = [&](const Parameter& other) {
          return other._unsafe_get_target() == tensor.unsafeGetTensorImpl();
        };
        if (!is_parameter || !tensor.requires_grad() || engine::Unit::of(tensor)) return;
        if (std::any_of(left_out_.begin(), left_out_.end(), is_same)) return;
        throw Error(c10::str(
            "shardwise: rank ", rank, ": the parameter '", name, "' was registered after ", function_,
            "(), so no rank averages its gradient and each would train it alone. Register all modules and parameters "
            "before wrapping, or give the new module to replicate() or fully_shard() too."));
      });
      known = now;
    }
  }

 private:
  using Parameter = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Wrapped {
    torch::nn::Module* module;
    std::weak_ptr<const void> life;
    /// Stands for its parameters, and which of them are trained, as they were when all was well.
    uint64_t fingerprint = 0;
  };

  std::vector<Wrapped> wrapped_;
  std::string function_;
  /// Holds their addresses, which no other tensor can have meanwhile.
  std::vector<Parameter> left_out_;
};

// As torch does it, and for buffers too. The tensors of an inner unit are where that unit wants them.
void move_to(at::Device device, const std::vector<engine::NamedTensor>& tensors) {
  for (const auto& named : tensors) {
    const auto& tensor = named.tensor;
    if (tensor.device() == device || tensor.is_meta() || engine::Unit::of(tensor)) continue;
    const base::ComputeGuard guard;
    tensor.set_data(tensor.to(device));
    keep_piece(tensor);
  }
}

void register_shards(torch::nn::Module& module, const engine::Unit& unit) {
  std::unordered_map<at::TensorImpl*, group::Parameter*> parameters;
  for (const auto& parameter : unit.parameters()) {
    parameters.emplace(parameter->leaf().unsafeGetTensorImpl(), parameter.get());
  }
  module.apply([&](torch::nn::Module& part) {
    for (auto& entry : ModuleParts::of(part)) {
      const auto found = parameters.find(entry.value().unsafeGetTensorImpl());
      if (found == parameters.end()) continue;
      entry.value() = found->second->visible();
      if (is_recurrent(part)) found->second->let_shard_keep_leaf();
    }
  });
}

} // namespace

void choose_dims(std::vector<engine::NamedTensor>& parameters, const FullyShardOptions::Placement& placement) {
  if (!placement) return;
  for (auto& parameter : parameters) {
    const auto chosen = placement(parameter.names.front(), parameter.tensor).value_or(0);
    parameter.shard_dim = chosen < 0 ? chosen + parameter.tensor.dim() : chosen;
  }
}

void choose_dtypes(std::vector<engine::NamedTensor>& parameters, const MixedPrecision& precision) {
  for (auto& parameter : parameters) {
    if (engine::Unit::of(parameter.tensor)) continue;
    const auto own = parameter.tensor.scalar_type();
    const auto wanted = parameter.tensor.grad_dtype();
    if (parameter.tensor.is_floating_point() && wanted != own) parameter.grad_dtype = wanted;
    if (!precision.param_dtype_override()) continue;
    const auto chosen = precision.param_dtype_override()(parameter.names.front(), parameter.tensor);
    if (!chosen || chosen == precision.param_dtype()) continue;
    if (*chosen != own) {
      throw ValueError(c10::str(
          "shardwise: param_dtype_override returned ", c10::getDtypeNames(*chosen).first, " for '",
          parameter.names.front(), "'. It must return nothing, param_dtype, or the parameter's own dtype, which is ",
          c10::getDtypeNames(own).first, "."));
    }
    parameter.full_dtype = chosen;
  }
}

bool is_cast(const std::vector<engine::NamedTensor>& parameters, const MixedPrecision& precision) {
  return precision.param_dtype() && std::any_of(parameters.begin(), parameters.end(), [&](const auto& parameter) {
           return parameter.tensor.is_floating_point() && !parameter.full_dtype &&
                  parameter.tensor.scalar_type() != *precision.param_dtype();
         });
}

std::shared_ptr<engine::Unit> wrap(
    const Modules& modules, const Mesh& mesh, std::vector<engine::NamedTensor> parameters,
    const std::vector<engine::NamedTensor>& buffers, engine::UnitSettings settings, const Exceptions& exceptions) {
  const bool has_full_copies = settings.layout != group::Layout::replicate;
  const auto touch = has_full_copies ? std::make_shared<UnitTouch>() : nullptr;
  std::unordered_set<const at::TensorImpl*> taken_for_members;
  if (has_full_copies) {
    taken_for_members = find_owners({modules.begin(), modules.end()}, exceptions.whole, parameters);
    if (!exceptions.allow_aliases) find_aliases(parameters);
  }
  settings.front_end = touch;
  move_to(mesh.device(), parameters);
  move_to(mesh.device(), buffers);
  auto unit = engine::Unit::create(mesh, std::move(parameters), buffers, settings);
  if (touch) touch->bind(unit, buffers, taken_for_members);
  for (auto* module : modules) {
    if (has_full_copies) register_shards(*module, *unit);
    if (!settings.is_companion) add_unit(*module, unit);
    add_unit_hooks(*module, unit, touch);
  }
  if (!settings.is_companion) {
    unit->set_modules_check(
        [later = LaterParameters(modules, unit->kind()), rank = mesh.rank()]() mutable { later.refuse(rank); });
  }
  return unit;
}

Modules pointers_to(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  Modules pointers;
  for (const auto& module : modules) pointers.push_back(module.get());
  return pointers;
}

} // namespace shardwise::nn
