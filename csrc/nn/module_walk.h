#pragma once

#include "engine/unit.h"

#include <torch/nn/module.h>

#include <vector>

namespace shardwise::nn {

/// The parameters and buffers below a module, each tensor once with all its names, in the order of registration.
/// Takes any module, on the stack and behind raw pointers too; owns nothing of it.
struct ModuleTensors {
  std::vector<engine::NamedTensor> parameters;
  std::vector<engine::NamedTensor> buffers;
};

ModuleTensors walk(const torch::nn::Module& module);

/// Adds what is not in `to` yet; a tensor that is there gets one more name.
void add_all(const ModuleTensors& from, ModuleTensors& to);

} // namespace shardwise::nn
