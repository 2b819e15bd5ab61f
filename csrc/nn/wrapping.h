#pragma once

#include "engine/front_end.h"

#include <shardwise/options.h>

#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace shardwise::nn {

using Modules = std::vector<torch::nn::Module*>;

/// What the user says of parameters that wrapping cannot know.
struct Exceptions {
  /// Those that stay whole.
  std::vector<at::Tensor> whole = {};
  /// Others in the memory of parameters keep their values, which is meant.
  bool allow_aliases = false;
};

/// Makes the unit, and lets it know of its modules' calls. Where it has full copies, their shards take their places in
/// the modules' registries, except for those that no member holds. Moves parameters and buffers to the mesh's device.
std::shared_ptr<engine::Unit> wrap(
    const Modules& modules, const Mesh& mesh, std::vector<engine::NamedTensor> parameters,
    const std::vector<engine::NamedTensor>& buffers, engine::UnitSettings settings, const Exceptions& exceptions);

/// Sets along which dimension each is cut, as `placement` says.
void place(std::vector<engine::NamedTensor>& parameters, const FullyShardOptions::Placement& placement);

/// Whether the modules are to compute in another dtype than the optimizer sees.
bool is_cast(const std::vector<engine::NamedTensor>& parameters, const MixedPrecision& precision);

/// The modules that the pointers hold.
Modules pointers_to(const std::vector<std::shared_ptr<torch::nn::Module>>& modules);

} // namespace shardwise::nn
