#pragma once

#include "engine/front_end.h"
#include "nn/wrap/module_walk.h"

#include <memory>
#include <vector>

namespace shardwise::nn {

/// Which module has which unit. Owns neither. If another module took over the address, its parameters tell.
std::shared_ptr<engine::Unit> find_unit(const torch::nn::Module& module, const ModuleTensors& tensors);
void add_unit(const torch::nn::Module& module, const std::shared_ptr<engine::Unit>& unit);

/// The tensors for a unit of these modules, without the ignored parameters; `function` is what is being called. Raises
/// ValueError if there is no module, if one has a unit already, or if a parameter is shared with a sharded unit of
/// other modules: its shard cannot be in the registries of both.
ModuleTensors tensors_of_unit(
    const std::vector<torch::nn::Module*>& modules, const std::vector<at::Tensor>& ignored, const char* function);

} // namespace shardwise::nn
