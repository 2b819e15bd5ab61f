#pragma once

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
/// ParameterDict, and what is left of a member that was assigned to. Its gradient is averaged all the same.
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
template <typename Holder>
requires requires(Holder& holder) {
  static_cast<torch::nn::Module&>(*holder);
}
Unit fully_shard(Holder&& holder, const FullyShardOptions& options = {}) {
  return fully_shard(static_cast<torch::nn::Module&>(*holder), options);
}

} // namespace shardwise
