#pragma once

#include <shardwise/detail/holder.h>
#include <shardwise/options.h>
#include <shardwise/unit.h>

#include <torch/ordered_dict.h>

#include <memory>
#include <string>
#include <vector>

namespace shardwise {

/// Data parallelism with a full copy of the module on every rank: after each backward, the gradient of every parameter
/// below `module` is its mean over the ranks of the mesh. The model needs no change, and its modules may be called in
/// any way.
///
/// Call it on inner modules first (each becomes a unit with a collective of its own), on the outermost last. A
/// parameter that no rank used gets no new gradient; one that some ranks used gets the mean, in which the others count
/// as zero. The mean is added to a gradient that is already in .grad. All ranks must wrap the same modules in the same
/// order. The call compares names, shapes and dtypes. A difference is an Error that names the parameter and the rank.
///
/// The call moves parameters and buffers to the mesh's device, except for those on the meta device: see meta.h.
///
/// Call it before training, from the thread that will train; every rank of the mesh must call it.
SHARDWISE_API Unit replicate(torch::nn::Module& module, const ReplicateOptions& options = {});

/// Makes one unit of several modules, whose gradients travel together.
SHARDWISE_API Unit
replicate(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const ReplicateOptions& options = {});

/// The same for tensors without a module, such as those of a torch::jit::Module: leaves that require a gradient, on the
/// mesh's device. Mixed precision and cpu_offload need modules, and raise ValueError.
///
/// If a tensor grows or shrinks between steps, make a new one on all ranks, and call this again with the new one: see
/// docs/cpp.md.
SHARDWISE_API Unit replicate(const std::vector<at::Tensor>& tensors, const ReplicateOptions& options = {});
/// The same for tensors with names, which errors use.
SHARDWISE_API Unit
replicate(const torch::OrderedDict<std::string, at::Tensor>& tensors, const ReplicateOptions& options = {});

/// Does not compile: the compiler's message says how to replicate a scripted module.
template <detail::Scripted Module>
Unit replicate(const Module& /*module*/, const ReplicateOptions& /*options*/ = {}) {
  static_assert(
      !detail::Scripted<Module>,
      "replicate() takes a torch::nn::Module. Give it the parameters of a torch::jit::Module as a list of tensors.");
  return Unit(nullptr);
}

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder>
Unit replicate(const Holder& holder, const ReplicateOptions& options = {}) {
  return replicate(detail::module_in(holder), options);
}

} // namespace shardwise
