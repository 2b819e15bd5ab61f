#pragma once

#include <shardwise/mesh.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <concepts>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace shardwise {

/// The dtypes in which a unit computes and sums. Only floating-point tensors are cast.
struct SHARDWISE_API MixedPrecision {
  /// Returns the compute dtype of a parameter: nullopt or `param_dtype` casts it to `param_dtype`, its own dtype
  /// leaves it uncast.
  using Override = std::function<std::optional<at::ScalarType>(const std::string& name, const at::Tensor& parameter)>;

  /// The dtype of full parameters, and so of what the module computes with. Unset: that of the parameters.
  TORCH_ARG(std::optional<at::ScalarType>, param_dtype) = std::nullopt;
  /// For parameters that are not to be cast, such as those of norms. Inputs are cast to `param_dtype` all the same.
  TORCH_ARG(Override, param_dtype_override) = {};
  /// The dtype in which gradients are summed, over backwards without synchronisation and over ranks. Unset:
  /// that of the parameters, whatever `param_dtype` is.
  TORCH_ARG(std::optional<at::ScalarType>, reduce_dtype) = std::nullopt;
  /// The dtype to which the module's outputs are cast, if its call fires hooks (hooks.h says which do).
  TORCH_ARG(std::optional<at::ScalarType>, output_dtype) = std::nullopt;
  /// Cast the module's inputs to `param_dtype`: all of them if its call fires hooks; otherwise the arguments of each
  /// operation that uses a full parameter.
  TORCH_ARG(bool, cast_forward_inputs) = true;
};

/// Keeps parameters() and their gradients in the host's memory, while the module computes on the mesh's device.
struct SHARDWISE_API CpuOffload {
  /// Use memory that the device can read by itself, so the host need not wait for copies. On a mesh of CPUs nothing is
  /// pinned or moved.
  TORCH_ARG(bool, pin_memory) = true;
};

/// The options of replicate(). Everything has a default.
struct SHARDWISE_API ReplicateOptions {
  /// The ranks with copies: a mesh of one axis. Unset: Mesh::current().
  TORCH_ARG(std::optional<Mesh>, mesh) = std::nullopt;
  /// Parameters that stay as they are.
  TORCH_ARG(std::vector<at::Tensor>, ignored_parameters) = {};
  /// If `param_dtype` differs from the parameters' own dtype, units also make and free full copies in it. If not, there
  /// are none, and casting the module later is an Error.
  TORCH_ARG(MixedPrecision, mixed_precision) = {};
  /// Unset: parameters and gradients stay on the mesh's device.
  TORCH_ARG(std::optional<CpuOffload>, cpu_offload) = std::nullopt;
  /// First give every rank the parameters and buffers of rank 0.
  TORCH_ARG(bool, broadcast) = true;
  /// Allow existing views and aliases of parameters, which keep their present values. Matters only if units make full
  /// copies.
  TORCH_ARG(bool, allow_aliases) = false;
};

/// What happens to full parameters after a unit's forward.
class ReshardAfterForward {
 public:
  /// True: they are freed. False: they stay until the backward is over.
  template <std::same_as<bool> Bool>
  ReshardAfterForward(Bool frees) : frees_(frees) {}
  /// They are freed, but each group of this many neighbouring ranks keeps one divided copy, and backward gathers
  /// within it. A divisor of the number of shards.
  template <std::same_as<int> Int>
  ReshardAfterForward(Int ranks) : frees_(true),
                                   ranks_(ranks) {}

  /// Whether they are freed, wholly or in part.
  bool frees() const {
    return frees_;
  }
  /// Unset: no group keeps a copy.
  std::optional<int> ranks() const {
    return ranks_;
  }

 private:
  bool frees_;
  std::optional<int> ranks_;
};

/// How fully_shard() cuts parameters.
enum class ShardLayout {
  /// Each parameter along one of its dimensions, into pieces whose sizes may differ by a row; some may be empty.
  rows,
  /// All parameters of a unit as one vector, of which each rank has a range; shards are one-dimensional. Full
  /// parameters are gathered in place.
  flat,
};

/// The options of fully_shard(). Everything has a default.
struct SHARDWISE_API FullyShardOptions {
  /// Returns the dimension along which to cut a parameter; nullopt: the first.
  using Placement = std::function<std::optional<int64_t>(const std::string& name, const at::Tensor& parameter)>;
  /// Returns the mesh of a parameter; nullopt: that of the call.
  using ParameterMesh = std::function<std::optional<Mesh>(const std::string& name, const at::Tensor& parameter)>;

  /// The ranks with shards: a mesh of one axis. A mesh of two axes is hybrid: the ranks along the second have shards,
  /// those along the first have copies of them. Unset: Mesh::current().
  TORCH_ARG(std::optional<Mesh>, mesh) = std::nullopt;
  /// Whether full parameters are freed after the unit's forward and gathered again in backward, and from how many
  /// ranks. Unset: they are, from all ranks; but those of the outermost unit stay, since backward needs them first.
  TORCH_ARG(std::optional<ReshardAfterForward>, reshard_after_forward) = std::nullopt;
  /// For ShardLayout::rows. Unset: all parameters are cut along their first dimension.
  TORCH_ARG(Placement, shard_placement) = {};
  /// For parameters whose shards lie on other ranks than the rest, such as a rank's own experts. Each mesh has
  /// its own collectives, but all these parameters are in one unit. All ranks must use their meshes in the
  /// same order.
  TORCH_ARG(ParameterMesh, parameter_mesh) = {};
  /// How parameters become shards.
  TORCH_ARG(ShardLayout, layout) = ShardLayout::rows;
  /// The dtypes in which units compute and sum gradients. Shards have the parameters' own dtype.
  TORCH_ARG(MixedPrecision, mixed_precision) = {};
  /// Unset: shards and their gradients stay on the mesh's device.
  TORCH_ARG(std::optional<CpuOffload>, cpu_offload) = std::nullopt;
  /// Parameters that stay as they are.
  TORCH_ARG(std::vector<at::Tensor>, ignored_parameters) = {};
  /// First give every rank the parameters and buffers of rank 0.
  TORCH_ARG(bool, broadcast) = true;
  /// Parameters that stay whole on every rank, with averaged gradients: those that a class of your own reads from its
  /// registry when it computes, without a member for them.
  TORCH_ARG(std::vector<at::Tensor>, whole_parameters) = {};
  /// Allow existing views and aliases of parameters. They keep their present values, so allow them only if nothing
  /// computes with them.
  TORCH_ARG(bool, allow_aliases) = false;
};

} // namespace shardwise
