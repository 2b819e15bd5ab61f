#include <shardwise/fully_shard.h>

#include "nn/recurrent.h"
#include "nn/unit_hooks.h"
#include "nn/unit_table.h"
#include "nn/unit_touch.h"

#include <set>
#include <unordered_map>

namespace shardwise {
namespace {

using Modules = std::vector<torch::nn::Module*>;

/// The way to a module's registered parameters, which are protected.
struct Registry : torch::nn::Module {
  static torch::OrderedDict<std::string, at::Tensor>& of(torch::nn::Module& module) {
    return module.*(&Registry::parameters_);
  }
};

template <typename Visit>
void for_each_module(torch::nn::Module& module, const Visit& visit) {
  visit(module);
  for (const auto& child : module.named_children()) for_each_module(*child.value(), visit);
}

// A parameter that only the registry knows is read there (ParameterList and ParameterDict do so, T07) or not at all
// (what is left of a member that was assigned to, T31). A shard there would be taken for it: it stays whole.
void keep_whole_what_only_the_registry_holds(const Modules& modules, std::vector<engine::NamedTensor>& parameters) {
  std::unordered_map<at::TensorImpl*, std::set<const at::Tensor*>> entries;
  for (auto* module : modules) {
    for_each_module(*module, [&](torch::nn::Module& part) {
      for (const auto& entry : Registry::of(part)) {
        if (entry.value().defined()) entries[entry.value().unsafeGetTensorImpl()].insert(&entry.value());
      }
    });
  }
  for (auto& parameter : parameters) {
    const auto known = entries[parameter.tensor.unsafeGetTensorImpl()].size() + 1;
    parameter.whole = parameter.tensor.use_count() <= known;
  }
}

void register_shards(torch::nn::Module& module, const engine::Unit& unit) {
  std::unordered_map<at::TensorImpl*, group::Parameter*> parameters;
  for (const auto& parameter : unit.parameters()) {
    parameters.emplace(parameter->leaf().unsafeGetTensorImpl(), parameter.get());
  }
  for_each_module(module, [&](torch::nn::Module& part) {
    for (auto& entry : Registry::of(part)) {
      const auto found = parameters.find(entry.value().unsafeGetTensorImpl());
      if (found == parameters.end()) continue;
      entry.value() = found->second->visible();
      if (nn::is_recurrent(part)) found->second->let_shard_keep_leaf();
    }
  });
}

void place(std::vector<engine::NamedTensor>& parameters, const FullyShardOptions& options) {
  if (!options.shard_placement()) return;
  for (auto& [names, tensor, dim, whole] : parameters) {
    const auto chosen = options.shard_placement()(names.front(), tensor).value_or(0);
    dim = chosen < 0 ? chosen + tensor.dim() : chosen;
  }
}

Unit shard(const Modules& modules, const FullyShardOptions& options) {
  auto all = nn::tensors_of_unit(modules, options.ignored_parameters(), "fully_shard");
  keep_whole_what_only_the_registry_holds(modules, all.parameters);
  place(all.parameters, options);
  const auto touch = std::make_shared<nn::UnitTouch>();
  auto unit = engine::Unit::create(
      options.mesh() ? *options.mesh() : Mesh::shared(), std::move(all.parameters), all.buffers,
      {.layout = options.layout() == ShardLayout::flat ? group::Layout::flat : group::Layout::rows,
       .broadcast = options.broadcast(),
       .reshard_after_forward = options.reshard_after_forward(),
       .front = touch});
  touch->bind(unit);
  for (auto* module : modules) {
    register_shards(*module, *unit);
    nn::add_unit(*module, unit);
    nn::add_unit_hooks(*module, unit);
  }
  return Unit(std::move(unit));
}

} // namespace

Unit fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  return shard({&module}, options);
}

Unit fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options) {
  Modules pointers;
  for (const auto& module : modules) pointers.push_back(module.get());
  return shard(pointers, options);
}

} // namespace shardwise
