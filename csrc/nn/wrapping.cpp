#include "nn/wrapping.h"

#include "group/compute_guard.h"
#include "nn/recurrent.h"
#include "nn/unit_hooks.h"
#include "nn/unit_table.h"
#include "nn/unit_touch.h"

#include <algorithm>
#include <set>
#include <unordered_map>

namespace shardwise::nn {
namespace {

/// The way to a module's registered parameters, which are protected.
struct ModuleParts : torch::nn::Module {
  static torch::OrderedDict<std::string, at::Tensor>& of(torch::nn::Module& module) {
    return module.*(&ModuleParts::parameters_);
  }
  static const torch::OrderedDict<std::string, at::Tensor>& of(const torch::nn::Module& module) {
    return module.*(&ModuleParts::parameters_);
  }
};

template <typename Module, typename Visit>
void for_each_module(Module& module, const Visit& visit) {
  visit(module);
  for (const auto& child : module.named_children()) for_each_module(static_cast<Module&>(*child.value()), visit);
}

// As torch does it, and for the buffers too. What an inner unit has is where it wants it.
void move_to(at::Device device, const std::vector<engine::NamedTensor>& tensors) {
  for (const auto& [names, tensor, dim, whole, full, values, extension] : tensors) {
    if (tensor.device() == device || tensor.is_meta() || engine::Unit::of(tensor)) continue;
    const group::ComputeGuard guard;
    tensor.set_data(tensor.to(device));
  }
}

void register_shards(torch::nn::Module& module, const engine::Unit& unit) {
  std::unordered_map<at::TensorImpl*, group::Parameter*> parameters;
  for (const auto& parameter : unit.parameters()) {
    parameters.emplace(parameter->leaf().unsafeGetTensorImpl(), parameter.get());
  }
  for_each_module(module, [&](torch::nn::Module& part) {
    for (auto& entry : ModuleParts::of(part)) {
      const auto found = parameters.find(entry.value().unsafeGetTensorImpl());
      if (found == parameters.end()) continue;
      entry.value() = found->second->visible();
      if (is_recurrent(part)) found->second->let_shard_keep_leaf();
    }
  });
}

} // namespace

// A parameter that only the registry knows is read there (ParameterList and ParameterDict do so, T07) or not at all
// (what is left of a member that was assigned to, T31). A shard there would be taken for it: it stays whole.
void keep_whole_what_only_the_registry_holds(
    const std::vector<const torch::nn::Module*>& modules, std::vector<engine::NamedTensor>& parameters) {
  std::unordered_map<at::TensorImpl*, std::set<const at::Tensor*>> entries;
  for (const auto* module : modules) {
    for_each_module(*module, [&](const torch::nn::Module& part) {
      for (const auto& entry : ModuleParts::of(part)) {
        if (entry.value().defined()) entries[entry.value().unsafeGetTensorImpl()].insert(&entry.value());
      }
    });
  }
  for (auto& parameter : parameters) {
    const auto known = entries[parameter.tensor.unsafeGetTensorImpl()].size() + 1;
    parameter.whole = parameter.tensor.use_count() <= known;
  }
}

void place(std::vector<engine::NamedTensor>& parameters, const FullyShardOptions::Placement& placement) {
  if (!placement) return;
  for (auto& [names, tensor, dim, whole, full, values, extension] : parameters) {
    const auto chosen = placement(names.front(), tensor).value_or(0);
    dim = chosen < 0 ? chosen + tensor.dim() : chosen;
  }
}

bool is_cast(const std::vector<engine::NamedTensor>& parameters, const MixedPrecision& precision) {
  return precision.param_dtype && std::any_of(parameters.begin(), parameters.end(), [&](const auto& parameter) {
           return parameter.tensor.is_floating_point() && parameter.tensor.scalar_type() != *precision.param_dtype;
         });
}

std::shared_ptr<engine::Unit> wrap(
    const Modules& modules, const Mesh& mesh, std::vector<engine::NamedTensor> parameters,
    const std::vector<engine::NamedTensor>& buffers, engine::UnitSettings settings) {
  const bool has_full_copies = settings.layout != group::Layout::replicate;
  const auto touch = has_full_copies ? std::make_shared<UnitTouch>() : nullptr;
  if (has_full_copies) keep_whole_what_only_the_registry_holds({modules.begin(), modules.end()}, parameters);
  settings.front = touch;
  move_to(mesh.device(), parameters);
  move_to(mesh.device(), buffers);
  auto unit = engine::Unit::create(mesh, std::move(parameters), buffers, settings);
  if (touch) touch->bind(unit, buffers);
  for (auto* module : modules) {
    if (has_full_copies) register_shards(*module, *unit);
    add_unit(*module, unit);
    add_unit_hooks(*module, unit, touch);
  }
  return unit;
}

Modules pointers_to(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  Modules pointers;
  for (const auto& module : modules) pointers.push_back(module.get());
  return pointers;
}

} // namespace shardwise::nn
