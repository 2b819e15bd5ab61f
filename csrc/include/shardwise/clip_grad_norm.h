#pragma once

#include <shardwise/detail/export.h>
#include <shardwise/detail/holder.h>

#include <ATen/core/Tensor.h>

#include <vector>

namespace shardwise {

/// torch::nn::utils::clip_grad_norm_ for sharded parameters: scales the gradients so that their norm, over all
/// parameters as one vector, is at most `max_norm`. Returns the norm that they had, the same on all ranks: a
/// tensor of one double, on the device of the mesh, or of the gradients if there is no mesh. The host waits for a
/// device only if gradients are on the host, or with `error_if_nonfinite`; and in item() of the result.
///
/// Every element counts once. Shards are added up over the ranks, in one collective for each mesh with sharded units. A
/// tensor that is listed twice counts once, and so does one that every rank has whole (replicated, ignored, plain).
/// Gradients of the latter should be equal on all ranks; if they are not, the mean over the ranks counts. Parameters
/// without a gradient do not count.
///
/// Parameters on a mesh of fewer ranks than the widest of these meshes, such as experts, count as different from those
/// on other meshes like it: they are added up over all ranks of the widest mesh.
///
/// `norm_type` must be above 0, and may be infinity. With `error_if_nonfinite` a norm that is not finite is an Error on
/// all ranks, and all gradients stay as they are.
///
/// All ranks must call it with the same parameters, including those without a gradient.
SHARDWISE_API at::Tensor clip_grad_norm_(
    const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
    bool error_if_nonfinite = false);

/// For all parameters of a module.
SHARDWISE_API at::Tensor clip_grad_norm_(
    const torch::nn::Module& module, double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false);

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder>
at::Tensor clip_grad_norm_(
    const Holder& holder, double max_norm, double norm_type = 2.0, bool error_if_nonfinite = false) {
  return clip_grad_norm_(static_cast<const torch::nn::Module&>(*holder), max_norm, norm_type, error_if_nonfinite);
}

} // namespace shardwise
