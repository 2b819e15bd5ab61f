#pragma once

#include <shardwise/holder.h>
#include <shardwise/options.h>
#include <shardwise/unit.h>

#include <memory>
#include <vector>

namespace torch::nn {
class Module;
}

namespace shardwise {

/// Data parallelism in which every rank holds a shard of each parameter below `module`, its gradient and what the
/// optimizer keeps for it. The full parameter is there only while its unit computes. No edit in the model, any form of
/// call.
///
/// From now on module.parameters() are the shards: give them to the optimizer. The module's own members (`weight`)
/// stay what they are, the full parameters; writing to one is an Error, since the values live in the shards. After
/// each backward a shard's gradient is this rank's part of the mean over the ranks, added to what was there.
///
/// A term over parameters() in the loss, such as an L2 penalty, is over this rank's shards: its gradient is right as it
/// is, neither averaged nor to be multiplied; its value is this rank's part, and the sum over the ranks is the whole.
///
/// torch::autograd::grad() with respect to members gives this rank's whole gradient, not averaged, and changes no
/// .grad. clone() of a wrapped module is an Error. RNN modules may be cast and moved like any other.
///
/// A parameter that no member holds, only the registry, stays whole on every rank: those of ParameterList and
/// ParameterDict and of classes made from them, what is left of a member of torch's modules that was assigned to, and
/// whatever nothing else holds; name in whole_parameters() what a class of your own hands out from its registry. Its
/// gradient is averaged all the same. Who else has handles on parameters, an optimizer or a variable, is of no matter;
/// but views and aliases, which would keep the values of now, are an Error on all ranks (allow_aliases()).
///
/// Members are read by operations. data_ptr(), accessors and the like cannot be seen: they work inside of a call whose
/// begin is seen (call.h says where), after an operation used the parameter in this forward, and after unshard(). While
/// a full copy is not current, because it is freed or its shards were written since, they raise an error that says so.
///
/// An optimizer is made afterwards: one that holds full parameters raises at its first step. It works element by
/// element: torch::optim::LBFGS and torch::nn::utils::clip_grad_norm_ would compute with this rank's shards for the
/// whole model, and are an Error. Freeze parameters() or members, each follows the other.
///
/// Call it on inner modules first (each becomes a unit that gathers its parameters on its own), on the outermost last.
/// All ranks must wrap the same modules in the same order, and then run the same units in the same order: names,
/// shapes and dtypes are compared here, and a difference is an Error that names the parameter and the rank.
///
/// Parameters and buffers that are not on the mesh's device are moved there. A module on the meta device stays there,
/// and so do its shards: see meta.h.
///
/// Call it before training, from the thread that will train; every rank of the mesh must call it.
SHARDWISE_API Unit fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});

/// One unit of several modules, which gather their parameters together.
SHARDWISE_API Unit
fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options = {});

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder>
Unit fully_shard(const Holder& holder, const FullyShardOptions& options = {}) {
  return fully_shard(detail::module_in(holder), options);
}

} // namespace shardwise
