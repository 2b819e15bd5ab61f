#include <shardwise/hooks.h>

#include "nn/hooks/backward_call.h"
#include "nn/hooks/hook_count.h"
#include "nn/hooks/hook_table.h"

#include <shardwise/error.h>
#include <shardwise/hooks_detail.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise {
namespace {

template <typename Function>
HookHandle add(
    torch::nn::Module& module, nn::HookList<Function> nn::HookLists::*kind, Function function, bool prepend,
    bool always_call = false) {
  if (!function) {
    throw ValueError(c10::str(
        "shardwise: the function given as a hook of ", module.name(),
        " is empty. Give a function that can be called; to remove a hook, use the handle that its registration "
        "returned."));
  }
  const auto hook = std::make_shared<nn::Hook<Function>>(&module, std::move(function), always_call);
  nn::HookTable::get().add(module, kind, hook, prepend);
  return HookHandle(hook);
}

} // namespace

void nn::require_count(const HookTensors& tensors, size_t count, const char* kind, const torch::nn::Module& module) {
  if (tensors.size() == count) return;
  throw ValueError(c10::str(
      "shardwise: a ", kind, " of ", module.name(), " was given ", count, " tensors and left ", tensors.size(),
      ". A hook may replace tensors, but not add or drop one: assign to the elements."));
}

HookHandle::HookHandle(std::weak_ptr<nn::HookBase> hook) : hook_(std::move(hook)) {}

void HookHandle::remove() {
  if (const auto hook = hook_.lock()) nn::HookTable::get().remove(*hook);
}

bool HookHandle::removed() const {
  const auto hook = hook_.lock();
  return !hook || hook->removed;
}

HookHandle register_forward_pre_hook(torch::nn::Module& module, ForwardPreHook hook, HookOptions options) {
  return add(module, &nn::HookLists::forward_pre, std::move(hook), options.prepend());
}

HookHandle register_forward_hook(torch::nn::Module& module, ForwardHook hook, ForwardHookOptions options) {
  return add(module, &nn::HookLists::forward, std::move(hook), options.prepend(), options.always_call());
}

HookHandle register_full_backward_pre_hook(torch::nn::Module& module, BackwardPreHook hook, HookOptions options) {
  return add(module, &nn::HookLists::backward_pre, std::move(hook), options.prepend());
}

HookHandle register_full_backward_hook(torch::nn::Module& module, BackwardHook hook, HookOptions options) {
  return add(module, &nn::HookLists::backward, std::move(hook), options.prepend());
}

namespace detail {

bool has_hooks(torch::nn::Module& module) {
  return nn::HookTable::get().find(module) != nullptr;
}

HookedCall::HookedCall(torch::nn::Module& module) : module_(module), lists_(nn::HookTable::get().find(module)) {}

void HookedCall::begin(HookTensors& inputs) {
  if (!lists_) return;
  const size_t count = inputs.size();
  for (const auto& hook : lists_->forward_pre) {
    if (hook->removed) continue;
    hook->function(module_, inputs);
    nn::require_count(inputs, count, "forward pre-hook", module_);
  }
  lists_ = nn::HookTable::get().find(module_);
  if (!lists_ || (lists_->backward_pre.empty() && lists_->backward.empty())) return;
  backward_ = std::make_shared<nn::BackwardCall>(module_, lists_);
  backward_->pass_inputs(inputs);
}

void HookedCall::end(HookTensors& outputs) {
  const size_t count = outputs.size();
  if (const auto lists = nn::HookTable::get().find(module_)) {
    for (const auto& hook : lists->forward) {
      if (hook->removed) continue;
      if (hook->always_call) called_.push_back(hook);
      hook->function(module_, outputs);
      nn::require_count(outputs, count, "forward hook", module_);
    }
  }
  if (backward_) backward_->pass_outputs(outputs);
}

void HookedCall::fail() {
  const auto lists = nn::HookTable::get().find(module_);
  if (!lists) return;
  for (const auto& hook : lists->forward) {
    const bool called = std::find(called_.begin(), called_.end(), hook) != called_.end();
    if (!hook->always_call || hook->removed || called) continue;
    try {
      HookTensors none;
      hook->function(module_, none);
    } catch (const std::exception& error) {
      TORCH_WARN("shardwise: after a failed call, a forward hook of ", module_.name(), " failed too: ", error.what());
    } catch (...) {
      TORCH_WARN("shardwise: after a failed call, a forward hook of ", module_.name(), " failed too.");
    }
  }
}

} // namespace detail
} // namespace shardwise
