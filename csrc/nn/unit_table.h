#pragma once

#include "engine/front_end.h"
#include "nn/module_walk.h"

#include <memory>
#include <vector>

namespace shardwise::nn {

/// Which module has which unit. Owns neither; an address that was used again is told apart by the parameters.
std::shared_ptr<engine::Unit> find_unit(const torch::nn::Module& module, const ModuleTensors& tensors);
void add_unit(const torch::nn::Module& module, const std::shared_ptr<engine::Unit>& unit);

/// The tensors of a unit of these modules, without the ignored parameters; `function` is what is called on them now.
/// Raises ValueError when there is no module, when one has a unit already, or when a parameter is shared with a sharded
/// unit of other modules, whose shard cannot stand in two registries.
ModuleTensors tensors_of_unit(
    const std::vector<torch::nn::Module*>& modules, const std::vector<at::Tensor>& ignored, const char* function);

} // namespace shardwise::nn
