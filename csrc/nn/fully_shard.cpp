#include <shardwise/fully_shard.h>

#include "nn/unit_table.h"
#include "nn/unit_touch.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>

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
void for_each_module(torch::nn::Module& module, const std::string& name, const Visit& visit) {
  visit(module, name);
  for (const auto& child : module.named_children()) {
    for_each_module(*child.value(), name.empty() ? child.key() : name + "." + child.key(), visit);
  }
}

// Their forward is to read the registry (T07), where the shards are.
void refuse_parameter_containers(torch::nn::Module& module) {
  for_each_module(module, "", [](torch::nn::Module& part, const std::string& name) {
    const bool is_container = dynamic_cast<torch::nn::ParameterListImpl*>(&part) != nullptr ||
                              dynamic_cast<torch::nn::ParameterDictImpl*>(&part) != nullptr;
    if (!is_container || Registry::of(part).is_empty()) return;
    throw ValueError(c10::str(
        "shardwise: '", name, "' is a ", part.name(), " with parameters ('", name, ".",
        Registry::of(part).front().key(),
        "'), and what it hands out would be shards. Register its parameters in a module that keeps them as members, "
        "use "
        "replicate(), or name them in ignored_parameters."));
  });
}

void register_shards(torch::nn::Module& module, const engine::Unit& unit) {
  std::unordered_map<at::TensorImpl*, at::Tensor> shards;
  for (const auto& parameter : unit.parameters()) {
    shards.emplace(parameter->leaf().unsafeGetTensorImpl(), parameter->visible());
  }
  for_each_module(module, "", [&](torch::nn::Module& part, const std::string&) {
    for (auto& entry : Registry::of(part)) {
      const auto shard = shards.find(entry.value().unsafeGetTensorImpl());
      if (shard != shards.end()) entry.value() = shard->second;
    }
  });
}

void place(std::vector<engine::NamedTensor>& parameters, const FullyShardOptions& options) {
  if (!options.shard_placement()) return;
  for (auto& [names, tensor, dim] : parameters) {
    const auto chosen = options.shard_placement()(names.front(), tensor).value_or(0);
    dim = chosen < 0 ? chosen + tensor.dim() : chosen;
  }
}

Unit shard(const Modules& modules, const FullyShardOptions& options) {
  if (modules.empty()) throw ValueError("shardwise: fully_shard() got no modules. Give it one or more.");
  nn::ModuleTensors all;
  for (size_t i = 0; i < modules.size(); ++i) {
    const auto tensors = nn::walk(*modules[i]);
    nn::refuse_second_unit(*modules[i], tensors, "fully_shard");
    nn::add_all(tensors, all);
  }
  nn::ignore(all.parameters, options.ignored_parameters());
  for (auto* module : modules) {
    if (options.ignored_parameters().empty()) refuse_parameter_containers(*module);
  }
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
