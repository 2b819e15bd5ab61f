#include "nn/unit_hooks.h"

#include <shardwise/hooks.h>

#include <c10/core/GradMode.h>

namespace shardwise::nn {
namespace {

using WeakUnit = std::weak_ptr<engine::Unit>;

void move_to(at::Device device, HookTensors& inputs) {
  for (auto& input : inputs) {
    if (input.defined() && input.device() != device) input = input.to(device, /*non_blocking=*/true);
  }
}

/// The backward of the module begins where the first gradient of an output is there; that of an inner module may have
/// begun with the same tensor. A leaf is not the module's own, and would keep the hook for good.
void watch_outputs(const HookTensors& outputs, const WeakUnit& weak) {
  for (const auto& output : outputs) {
    if (!output.defined() || !output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([weak](const at::Tensor&) {
      const auto unit = weak.lock();
      if (unit && unit->unshards_in_backward()) unit->enter(engine::Keep::outer_and_inner);
    });
  }
}

} // namespace

FrontParts& front_parts() {
  static FrontParts parts;
  return parts;
}

void add_unit_hooks(torch::nn::Module& module, const std::shared_ptr<engine::Unit>& unit) {
  if (!front_parts().hooks) return;
  observe_calls(module);
  const WeakUnit weak = unit;
  register_forward_pre_hook(module, [weak](torch::nn::Module&, HookTensors& inputs) {
    const auto self = weak.lock();
    if (!self) return;
    if (!self->outer()) move_to(self->device(), inputs);
    if (self->sharded()) self->enter(engine::Keep::outer);
  });
  if (!unit->sharded()) return;
  register_forward_hook(module, [weak](torch::nn::Module&, HookTensors& outputs) {
    const auto self = weak.lock();
    if (!self) return;
    if (c10::GradMode::is_enabled()) watch_outputs(outputs, weak);
    self->leave();
  });
}

} // namespace shardwise::nn
