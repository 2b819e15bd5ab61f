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

/// What only the user can say about parameters.
struct Exceptions {
  /// Parameters that stay whole.
  std::vector<at::Tensor> whole = {};
  /// Other tensors in the memory of parameters are allowed: they keep today's values, and are meant to.
  bool allow_aliases = false;
};

/// Makes the unit, and adds the hooks that tell it of its modules' calls. If it has full copies, shards take the place
/// of parameters in the modules' registries, except for parameters that no member holds. Moves parameters and buffers
/// to the mesh's device.
std::shared_ptr<engine::Unit> wrap(
    const Modules& modules, const Mesh& mesh, std::vector<engine::NamedTensor> parameters,
    const std::vector<engine::NamedTensor>& buffers, engine::UnitSettings settings, const Exceptions& exceptions);

/// Sets the dimension along which each is cut, as `placement` says.
void choose_dims(std::vector<engine::NamedTensor>& parameters, const FullyShardOptions::Placement& placement);

/// Sets the dtypes of full copies that `precision` says of single parameters, and those of gradients that these say
/// themselves. Raises ValueError for one that is neither
/// the parameter's own nor `param_dtype`.
void choose_dtypes(std::vector<engine::NamedTensor>& parameters, const MixedPrecision& precision);

/// Whether the modules are to compute in a dtype other than what the optimizer sees.
bool is_cast(const std::vector<engine::NamedTensor>& parameters, const MixedPrecision& precision);

/// The modules that the pointers hold.
Modules pointers_to(const std::vector<std::shared_ptr<torch::nn::Module>>& modules);

} // namespace shardwise::nn
