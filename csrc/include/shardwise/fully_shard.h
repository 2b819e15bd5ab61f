#pragma once

#include <shardwise/detail/holder.h>
#include <shardwise/options.h>
#include <shardwise/unit.h>

#include <memory>
#include <vector>

namespace shardwise {

/// Data parallelism in which every rank has only a shard of each parameter below `module`, its gradient and optimizer
/// state. Full parameters have memory only while their unit (one call's modules) computes. The model needs no change,
/// and modules may be called in any way.
///
/// From now on module.parameters() are the shards: give them to the optimizer. The module's own members (`weight`)
/// remain the full parameters. A write to a member is an Error, since it would be lost. After each backward each
/// shard's .grad gains this rank's part of the mean gradient over all ranks.
///
/// A loss term over parameters(), such as an L2 penalty, covers this rank's shards only. Its gradient is not
/// averaged and needs no factor. Its value is this rank's part: sum it over the ranks.
///
/// torch::autograd::grad() with respect to members gives this rank's whole gradient, not averaged, and changes no
/// .grad. clone() of a wrapped module is an Error. RNN modules may be cast and moved like any other.
///
/// A parameter that is registered but held by no member stays whole on every rank; its gradient is averaged too.
/// ParameterList, ParameterDict and classes derived from them have such parameters, and so does a torch module whose
/// member was reassigned. If your own class reads registered parameters when it computes, name them in
/// whole_parameters(). Other handles on parameters (an optimizer's, a variable) do no harm. Views and aliases would
/// keep present values: they are an Error on all ranks (see allow_aliases()).
///
/// Read members with operations. The engine does not notice reads by data_ptr(), accessors and the like. They work
/// inside a call that fires hooks (hooks.h says which), after an operation used the parameter in this forward, or
/// after unshard(). While a full copy is freed, or older than its shards, such reads raise an error that says so.
///
/// Make the optimizer afterwards: one with full parameters raises at its first step. It must work element by element:
/// torch::optim::LBFGS and torch::nn::utils::clip_grad_norm_ would take this rank's shards for the whole model, and are
/// an Error. You may freeze parameters() or members: each follows the other.
///
/// Call it on inner modules first (each becomes a unit that gathers its parameters on its own), on the outermost last.
/// All ranks must wrap the same modules in the same order, and then run the same units in the same order. The call
/// compares names, shapes and dtypes. A difference is an Error that names the parameter and the rank.
///
/// The call moves parameters and buffers to the mesh's device. A module on the meta device stays there, and so do its
/// shards: see meta.h.
///
/// Call it before training, from the thread that will train; every rank of the mesh must call it.
SHARDWISE_API Unit fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});

/// Makes one unit of several modules, which gather their parameters together.
SHARDWISE_API Unit
fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options = {});

/// Does not compile: a scripted module cannot be sharded. The compiler's message names the alternative.
template <detail::Scripted Module>
Unit fully_shard(const Module& /*module*/, const FullyShardOptions& /*options*/ = {}) {
  static_assert(
      !detail::Scripted<Module>,
      "fully_shard() takes a torch::nn::Module. A torch::jit::Module cannot be sharded: give its parameters to "
      "replicate(), as a list of tensors.");
  return Unit(nullptr);
}

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder>
Unit fully_shard(const Holder& holder, const FullyShardOptions& options = {}) {
  return fully_shard(detail::module_in(holder), options);
}

} // namespace shardwise
