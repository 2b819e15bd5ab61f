#pragma once

#include <shardwise/detail/export.h>
#include <shardwise/detail/holder.h>

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <utility>

namespace shardwise {

namespace detail {

/// While it lives, tensors that this thread makes without naming a device are on the meta device.
class SHARDWISE_API MetaMode {
 public:
  MetaMode();

 private:
  c10::impl::IncludeDispatchKeyGuard seen_;
};

} // namespace detail

/// Returns what make() returns, with its parameters and buffers on the meta device: sizes and dtypes without memory.
/// For models that are too large to be whole on one rank:
///
///   auto model = shardwise::on_meta([] { return Model(); });
///   shardwise::fully_shard(model);        // its shards are on the meta device too
///   shardwise::to_empty(model);           // memory for this rank's shards alone
///   load_full_state_dict(model, dict);    // or initialize in shardwise::with_whole_parameters()
///
/// Every tensor that make() makes on this thread without naming a device is on the meta device, without random numbers.
/// Tensors that name a device (`torch::TensorOptions().device(torch::kCPU)`), torch::tensor({...}) of a list, and
/// tensors of existing memory (from_blob, clone) are as usual. Values of a tensor on the meta device cannot be read.
/// torch's own Module::to(torch::kMeta) is an error in LibTorch.
template <typename Make>
auto on_meta(Make&& make) {
  const detail::MetaMode mode;
  return std::forward<Make>(make)();
}

/// Gives memory to the parameters and buffers of a module that are on the meta device; others stay as they are. A
/// parameter of a sharded unit gets memory for this rank's shard alone. All stay the same tensors, under all their
/// names and in every member, with their hooks, in optimizers made before or after.
///
/// The values are zeros: before the first forward give every shard, replicated parameter and buffer its own, with
/// load_full_state_dict() or in with_whole_parameters(). Before to_empty(), a forward, a gather, a full state
/// dict and clipping are an Error that names all parameters that are still on the meta device.
///
/// Parameters of units, and buffers, go to the mesh's device; with cpu_offload shards go to the host's memory. `device`
/// says where the tensors of a module without units go; for any other module it must be the mesh's.
///
/// All ranks call it for the same modules. No rank waits for another.
SHARDWISE_API void to_empty(torch::nn::Module& module, std::optional<at::Device> device = std::nullopt);

/// The same for a module holder or a shared_ptr to a module.
template <detail::HoldsModule Holder>
void to_empty(const Holder& holder, std::optional<at::Device> device = std::nullopt) {
  to_empty(detail::module_in(holder), device);
}

} // namespace shardwise
