#include "nn/hooks/unit_hooks.h"

#include "nn/touch/unit_touch.h"

#include <shardwise/hooks.h>

#include <c10/core/GradMode.h>

namespace shardwise::nn {
namespace {

using WeakUnit = std::weak_ptr<engine::Unit>;

void move_to(at::Device device, HookTensors& inputs) {
  for (auto& input : inputs) {
    // Blocking, as torch's: the program may use the memory of its batch again.
    if (input.defined() && input.device() != device) input = input.to(device);
  }
}

void cast(HookTensors& tensors, std::optional<at::ScalarType> dtype) {
  if (!dtype) return;
  for (auto& tensor : tensors) {
    if (tensor.defined() && tensor.is_floating_point()) tensor = tensor.to(*dtype);
  }
}

/// Marks calls: before all other hooks, and after them whether the call fails or not.
void mark_calls(torch::nn::Module& module, const std::weak_ptr<UnitTouch>& weak) {
  const auto begin = [weak](torch::nn::Module&, HookTensors&) {
    if (const auto touch = weak.lock()) touch->begin_call();
  };
  const auto end = [weak](torch::nn::Module&, HookTensors&) {
    if (const auto touch = weak.lock()) touch->end_call();
  };
  register_forward_pre_hook(module, begin, HookOptions().prepend(true));
  register_forward_hook(module, end, ForwardHookOptions().always_call(true));
}

void watch_calls(torch::nn::Module& module, const std::shared_ptr<engine::Unit>& unit) {
  const WeakUnit weak = unit;
  register_forward_pre_hook(module, [weak](torch::nn::Module&, HookTensors& inputs) {
    const auto self = weak.lock();
    if (!self) return;
    if (c10::GradMode::is_enabled()) self->check_modules();
    if (!self->outer()) move_to(self->device(), inputs);
    if (self->precision().cast_forward_inputs()) cast(inputs, self->precision().param_dtype());
    if (self->has_full_copies()) {
      self->schedule()->enter(*self);
    } else {
      // A cast of the parameters has to be noticed before the inputs meet them.
      self->precision().param_dtype() ? self->renew_groups() : self->need_values();
      self->schedule()->await_optimizer();
    }
  });
  if (unit->has_full_copies()) {
    register_forward_hook(module, [weak](torch::nn::Module&, HookTensors& outputs) {
      const auto self = weak.lock();
      if (!self) return;
      for (const auto& output : outputs) {
        if (c10::GradMode::is_enabled() && output.defined()) engine::begin_backward_at(output, weak);
      }
      self->schedule()->leave(*self);
    });
  }
  if (unit->precision().output_dtype()) {
    register_forward_hook(module, [dtype = unit->precision().output_dtype()](torch::nn::Module&, HookTensors& outputs) {
      cast(outputs, dtype);
    });
  }
}

} // namespace

TestSwitches& test_switches() {
  static TestSwitches switches;
  return switches;
}

void add_unit_hooks(
    torch::nn::Module& module, const std::shared_ptr<engine::Unit>& unit, const std::shared_ptr<UnitTouch>& touch) {
  if (!test_switches().hooks) return;
  observe_calls(module);
  if (!unit->timing().is_companion) watch_calls(module, unit);
  if (touch && unit->precision().param_dtype()) mark_calls(module, touch);
}

} // namespace shardwise::nn
