#pragma once

#include "engine/unit.h"

#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace shardwise::nn {

using Modules = std::vector<torch::nn::Module*>;

/// Makes the unit, and lets it know of its modules' calls. Where it has full copies, their shards take their places in
/// the modules' registries, except for those that no member holds.
std::shared_ptr<engine::Unit> wrap(
    const Modules& modules, const Mesh& mesh, std::vector<engine::NamedTensor> parameters,
    const std::vector<engine::NamedTensor>& buffers, engine::UnitSettings settings);

/// The modules that the pointers hold.
Modules pointers_to(const std::vector<std::shared_ptr<torch::nn::Module>>& modules);

} // namespace shardwise::nn
