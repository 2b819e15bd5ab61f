#pragma once

#include <shardwise/export.h>
#include <shardwise/holder.h>
#include <shardwise/state_dict.h>

#include <torch/optim/optimizer.h>

namespace shardwise {

/// What an optimizer of torch::optim, or one of ours, keeps for the parameters of a module, as whole tensors: under the
/// names that PyTorch's get_optimizer_state_dict() gives with flatten_optimizer_state_dict=True.
///
///   state.<parameter>.<name>         exp_avg, momentum_buffer and the like, in the sizes of the whole parameter;
///   state.<parameter>.step           one number, in single precision on the host;
///   param_groups.<parameter>.<name>  the options of the parameter's group, numbers of double precision or bools on the
///                                    host; betas are two in one tensor.
///
/// A parameter with several names has the first of them. Nothing is there for state that the optimizer does not have
/// yet. The tensors are copies.
///
/// For SGD, Adam, AdamW, Adagrad and RMSprop, and what is derived from them. May be called at any time outside of a
/// backward. All ranks must call it for the same module, with optimizers that keep the same; if it cannot work on one
/// rank, all ranks raise the same Error. Raises ValueError for optimizers of other classes.
SHARDWISE_API StateDict full_optimizer_state_dict(
    const torch::nn::Module& module, torch::optim::Optimizer& optimizer, const FullStateDictOptions& options = {});

/// Sets what an optimizer keeps for the parameters of a module, and the options of its groups: the opposite of
/// full_optimizer_state_dict(). The dict may come from any number of ranks, or from PyTorch. Values take the dtype and
/// the device of their parameters. For a parameter of which the dict has options but no state the optimizer keeps
/// nothing afterwards. Everything is checked before anything is changed: all ranks raise the same Error, which lists
/// what is wrong.
///
/// With strict(false) parameters of which the dict has nothing stay as they are. All parameters of a group must have
/// the same options in the dict. `elements` of the result counts those of whole tensors in the state.
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

template <detail::HoldsModule Holder>
LoadResult load_full_optimizer_state_dict(
    const Holder& holder, torch::optim::Optimizer& optimizer, const StateDict& dict,
    const LoadStateDictOptions& options = {}) {
  return load_full_optimizer_state_dict(detail::module_in(holder), optimizer, dict, options);
}

} // namespace shardwise
