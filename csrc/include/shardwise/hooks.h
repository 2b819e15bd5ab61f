#pragma once

/// @file
/// Hooks on any torch::nn::Module, which LibTorch lacks. These calls fire hooks:
/// - call(module, x) and holders made with SHARDWISE_MODULE, see <shardwise/call.h>;
/// - the calls of a Sequential, a Transformer or an AnyModule, after observe_calls().
/// A direct module->forward(x) fires no hook.
///
/// Hooks of one kind fire in the order of their registration. A hook that is removed while a call runs fires no more,
/// not even in the backward of an earlier forward. One that is registered inside a hook fires from the next kind on. An
/// exception from a hook reaches the caller of the module, or of backward().
///
/// Hooks belong to the module itself, not to copies or clones of it, and do not own it. Once it is gone they are
/// dropped, at a later registration at the latest. Any module will do, even one on the stack. In a constructor,
/// register hooks after the module's parameters or submodules: these identify it once a shared_ptr owns it.
///
/// Thread safe. No lock is held while a hook runs.

#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <functional>
#include <memory>
#include <vector>

namespace torch::nn {
class AnyModule;
class Module;
} // namespace torch::nn

namespace shardwise::nn {
struct HookBase;
}

namespace shardwise {

/// The tensors of a call, in order: arguments or results that are a Tensor, and those in a vector, optional, pair,
/// tuple or array of such. An empty optional counts as an undefined tensor. A hook may replace tensors, but not add or
/// drop one: that is a ValueError.
using HookTensors = std::vector<at::Tensor>;

/// Before forward, which gets what the hook leaves in `inputs`.
using ForwardPreHook = std::function<void(torch::nn::Module&, HookTensors& inputs)>;
/// After forward. The caller gets what the hook leaves in `outputs`.
using ForwardHook = std::function<void(torch::nn::Module&, HookTensors& outputs)>;
/// Before the module's backward, with one gradient for each output: undefined for those that got none.
using BackwardPreHook = std::function<void(torch::nn::Module&, HookTensors& output_gradients)>;
/// When the gradients of the inputs are there: undefined for inputs that need none. If no input needs one, it fires
/// right after the backward pre-hooks, and setting a gradient is an Error.
using BackwardHook =
    std::function<void(torch::nn::Module&, HookTensors& input_gradients, const HookTensors& output_gradients)>;

/// The options of forward pre-hooks and of both kinds of backward hooks.
struct SHARDWISE_API HookOptions {
  /// Fire before the hooks that are registered already, not after them.
  TORCH_ARG(bool, prepend) = false;
};

/// The options of forward hooks.
struct SHARDWISE_API ForwardHookOptions {
  /// Fire before the forward hooks that are registered already, not after them.
  TORCH_ARG(bool, prepend) = false;
  /// Fire even if forward or another hook throws, then without outputs. What the hook itself throws then is only a
  /// warning.
  TORCH_ARG(bool, always_call) = false;
};

/// Removes a hook. A handle that is destroyed leaves its hook in place; copies of a handle stand for the same hook.
/// Thread safe.
class SHARDWISE_API HookHandle {
 public:
  /// A handle of no hook.
  HookHandle() = default;
  /// The functions that register hooks call it.
  explicit HookHandle(std::weak_ptr<nn::HookBase> hook);

  /// May be called any number of times, even inside the hook, and after the module is gone.
  void remove();
  /// Whether the hook was removed, or dropped with its module.
  bool removed() const;

 private:
  std::weak_ptr<nn::HookBase> hook_;
};

/// Registers a hook that fires before forward. This function and the next three raise ValueError for an empty function.
SHARDWISE_API HookHandle
register_forward_pre_hook(torch::nn::Module& module, ForwardPreHook hook, HookOptions options = {});
/// Registers a hook that fires after forward.
SHARDWISE_API HookHandle
register_forward_hook(torch::nn::Module& module, ForwardHook hook, ForwardHookOptions options = {});

/// Registers a hook that fires before the module's backward, for calls in grad mode. As in PyTorch, inputs reach
/// forward and outputs reach the caller as views that must not be changed in place: torch raises an error then.
SHARDWISE_API HookHandle
register_full_backward_pre_hook(torch::nn::Module& module, BackwardPreHook hook, HookOptions options = {});
/// Registers a hook that fires when the gradients of the inputs are there, with the same rules for calls and views.
SHARDWISE_API HookHandle
register_full_backward_hook(torch::nn::Module& module, BackwardHook hook, HookOptions options = {});

/// Makes the calls of containers fire hooks, at and below `root`: Sequential, and the AnyModules of Transformer,
/// TransformerEncoder and TransformerDecoder. Types, names, saved files, clones, at<T>() and ptr() stay as they are.
/// Call it again for new modules, for example after push_back(). Clones are not observed. Do not call it while another
/// thread calls the containers.
SHARDWISE_API void observe_calls(torch::nn::Module& root);
/// The same for an AnyModule and everything below it, for one that is a member of a user's module, where a walk over
/// children cannot find it. Copies of it are observed too.
SHARDWISE_API void observe_calls(torch::nn::AnyModule& module);
/// Undoes every observe_calls() at and below `root`. Hooks stay registered.
SHARDWISE_API void unobserve_calls(torch::nn::Module& root);
/// The same for an AnyModule and everything below it.
SHARDWISE_API void unobserve_calls(torch::nn::AnyModule& module);

} // namespace shardwise
