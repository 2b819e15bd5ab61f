#pragma once

#include <shardwise/detail/export.h>
#include <shardwise/detail/holder.h>
#include <shardwise/state_dict.h>

#include <torch/optim/optimizer.h>

namespace shardwise {

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

} // namespace shardwise
