#pragma once

#include "engine/unit.h"
#include "nn/module_walk.h"

#include <memory>

namespace shardwise::nn {

/// Which module has which unit. Owns neither; an address that was used again is told apart by the parameters.
std::shared_ptr<engine::Unit> find_unit(const torch::nn::Module& module, const ModuleTensors& tensors);
void add_unit(const torch::nn::Module& module, const std::shared_ptr<engine::Unit>& unit);

/// Raises an Error when the module has a unit already; `function` is what is called on it now.
void refuse_second_unit(const torch::nn::Module& module, const ModuleTensors& tensors, const char* function);

/// Takes parameters out of the list.
void ignore(std::vector<engine::NamedTensor>& parameters, const std::vector<at::Tensor>& ignored);

} // namespace shardwise::nn
