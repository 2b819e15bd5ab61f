#pragma once

#include <shardwise/detail/export.h>
#include <shardwise/detail/holder.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace shardwise {

/// Whole tensors by name, in the order in which torch's state_dict() of the plain module has them.
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

/// The options of full_state_dict(). Everything has a default.
struct SHARDWISE_API FullStateDictOptions {
  /// Only rank 0 gets the values; the other ranks get an empty dict.
  TORCH_ARG(bool, rank0_only) = false;
  /// Put the values on the CPU, one parameter after the other.
  TORCH_ARG(bool, cpu_offload) = false;
};

/// All parameters and buffers of a module as whole tensors, whether it is sharded, replicated, a part of such a module,
/// or plain. They are copies, without gradient: later training changes none of them. A tensor with several names is one
/// tensor under all of them, as in the plain module.
///
/// Call it at any time outside of a backward, even between a forward and its backward: full copies, gradients and
/// version counters stay as they are. It gathers sharded parameters unit by unit: the peak of memory is the result and
/// the largest unit.
///
/// All ranks must call it for the same module. If it cannot work on one rank, all ranks raise the same Error.
SHARDWISE_API StateDict full_state_dict(const torch::nn::Module& module, const FullStateDictOptions& options = {});

/// The options of load_full_state_dict(). Everything has a default.
struct SHARDWISE_API LoadStateDictOptions {
  /// Whether names that only the module or only the dict has are an Error. If not, they are returned.
  TORCH_ARG(bool, strict) = true;
  /// Every rank gets the values of rank 0, whatever dicts the others give. If false, every rank takes the values of its
  /// own dict, which must be the same on all of them.
  TORCH_ARG(bool, broadcast_from_rank0) = true;
};

/// What load_full_state_dict() did; the same on all ranks when the values came from rank 0.
struct SHARDWISE_API LoadResult {
  /// Names that only the module has.
  std::vector<std::string> missing;
  /// Names that only the dict has.
  std::vector<std::string> unexpected;
  /// How many elements of whole tensors were set.
  int64_t elements = 0;
};

/// Sets parameters and buffers of a module, in place, to whole tensors by name: the opposite of full_state_dict(). The
/// dict may come from any number of ranks, or from a plain module. Parameters, shards and optimizer state stay the same
/// tensors. Kept full copies are gathered anew before their next use.
///
/// A tensor with several names takes the value of any of them, the last one if the dict has several. Shapes and dtypes
/// must be the module's. The call checks everything before it changes anything: all ranks raise the same Error, which
/// lists what is wrong.
///
/// All ranks must call it for the same module, outside of a backward. A module without units has no other ranks: each
/// takes its own dict. One whose units lie on several meshes needs broadcast_from_rank0(false).
SHARDWISE_API LoadResult
load_full_state_dict(torch::nn::Module& module, const StateDict& dict, const LoadStateDictOptions& options = {});

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder>
StateDict full_state_dict(const Holder& holder, const FullStateDictOptions& options = {}) {
  return full_state_dict(static_cast<const torch::nn::Module&>(*holder), options);
}

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder>
LoadResult load_full_state_dict(const Holder& holder, const StateDict& dict, const LoadStateDictOptions& options = {}) {
  return load_full_state_dict(detail::module_in(holder), dict, options);
}

/// The state of an optimizer of torch::optim, or of ours, for the parameters of a module, as whole tensors: under the
/// names that PyTorch's get_optimizer_state_dict() gives with flatten_optimizer_state_dict=True.
///
///   state.PARAMETER.NAME         exp_avg, momentum_buffer and the like, in the sizes of the whole parameter;
///   state.PARAMETER.step         one number, in single precision on the host;
///   param_groups.PARAMETER.NAME  the options of the parameter's group, numbers of double precision or bools on the
///                                host; betas are two in one tensor.
///
/// A parameter with several names has the first of them. The dict has only state that the optimizer has already. The
/// tensors are copies.
///
/// For SGD, Adam, AdamW, Adagrad and RMSprop, and classes derived from them. Call it at any time outside of a backward.
/// All ranks must call it for the same module, with optimizers that have the same kinds of state; if it cannot work on
/// one rank, all ranks raise the same Error. Raises ValueError for optimizers of other classes.
SHARDWISE_API StateDict full_optimizer_state_dict(
    const torch::nn::Module& module, torch::optim::Optimizer& optimizer, const FullStateDictOptions& options = {});

/// Sets the state of an optimizer for the parameters of a module, and the options of its groups: the opposite of
/// full_optimizer_state_dict(). The dict may come from any number of ranks, or from PyTorch. Values take the dtype and
/// the device of their parameters. A parameter with options in the dict but without state has no state afterwards. The
/// call checks everything before it changes anything: all ranks raise the same Error, which lists what is wrong.
///
/// With strict(false) a parameter that the dict does not have stays as it is. All parameters of a group must have the
/// same options in the dict. `elements` of the result counts those of whole tensors in the state.
///
/// All ranks must call it for the same module, outside of a backward. A module whose units lie on several meshes needs
/// broadcast_from_rank0(false).
SHARDWISE_API LoadResult load_full_optimizer_state_dict(
    torch::nn::Module& module, torch::optim::Optimizer& optimizer, const StateDict& dict,
    const LoadStateDictOptions& options = {});

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder>
StateDict full_optimizer_state_dict(
    const Holder& holder, torch::optim::Optimizer& optimizer, const FullStateDictOptions& options = {}) {
  return full_optimizer_state_dict(static_cast<const torch::nn::Module&>(*holder), optimizer, options);
}

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder>
LoadResult load_full_optimizer_state_dict(
    const Holder& holder, torch::optim::Optimizer& optimizer, const StateDict& dict,
    const LoadStateDictOptions& options = {}) {
  return load_full_optimizer_state_dict(detail::module_in(holder), optimizer, dict, options);
}

/// Calls `change` while the module has whole parameters, in its members and in parameters(): to initialize them after
/// to_empty(), change a row, keep a constraint, quantize, or go through torch::nn::utils::vector_to_parameters().
///
///   shardwise::with_whole_parameters(model, [&] { torch::nn::init::xavier_uniform_(model->weight); });
///
/// Afterwards all ranks have the values of rank 0, unless broadcast_from_rank0(false) says that each took the same
/// ones. The whole module is in memory meanwhile. `change` must not run the module. If it throws on a rank, sharded
/// parameters stay as they were, and all ranks raise.
///
/// All ranks must call it for the same module, outside of a forward and of a backward.
SHARDWISE_API void with_whole_parameters(
    torch::nn::Module& module, const std::function<void()>& change, const LoadStateDictOptions& options = {});

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder>
void with_whole_parameters(
    const Holder& holder, const std::function<void()>& change, const LoadStateDictOptions& options = {}) {
  with_whole_parameters(detail::module_in(holder), change, options);
}

} // namespace shardwise
