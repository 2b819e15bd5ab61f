#pragma once

#include "engine/front_end.h"

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

namespace shardwise::nn {

/// The parameters and buffers below modules, each tensor once with all its names, in the order of registration. Takes
/// any module, even on the stack or behind a raw pointer; owns nothing of it.
struct ModuleTensors {
  std::vector<engine::NamedTensor> parameters;
  std::vector<engine::NamedTensor> buffers;
};

/// Every defined tensor under each of its names: a module's parameters, its buffers, then its children.
void for_each_tensor(
    const torch::nn::Module& module,
    const std::function<void(const std::string& name, const at::Tensor& tensor, bool is_parameter)>& visit);

ModuleTensors walk(const torch::nn::Module& module);
ModuleTensors walk(const std::vector<const torch::nn::Module*>& modules);

/// Adds a tensor, or another name of one that is there.
void add_parameter(const std::string& name, const at::Tensor& tensor, ModuleTensors& to);

} // namespace shardwise::nn
