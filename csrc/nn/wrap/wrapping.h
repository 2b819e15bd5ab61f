#pragma once

#include "engine/front_end.h"

#include <shardwise/options.h>

#include <memory>
#include <vector>

namespace shardwise::nn {

using Modules = std::vector<torch::nn::Module*>;

/// What only the user can say about parameters.
struct Exceptions {
  /// Parameters that stay whole.
  std::vector<at::Tensor> whole = {};
  /// Allows other tensors in the memory of parameters. They stay at their present values.
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

/// Sets the dtype of each parameter's full copy if `precision` has one for it, and the dtype of its gradient if the
/// parameter has one. Raises ValueError for a dtype that is neither the parameter's own nor `param_dtype`.
void choose_dtypes(std::vector<engine::NamedTensor>& parameters, const MixedPrecision& precision);

/// Whether the modules compute in another dtype than that of the parameters in the optimizer.
bool is_cast(const std::vector<engine::NamedTensor>& parameters, const MixedPrecision& precision);

/// The modules that the pointers hold.
Modules pointers_to(const std::vector<std::shared_ptr<torch::nn::Module>>& modules);

} // namespace shardwise::nn
