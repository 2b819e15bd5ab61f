#include "base/caller.h"
#include "nn/hooks/hook_table.h"

#include <shardwise/detail/hooks.h>
#include <shardwise/error.h>
#include <shardwise/hooks.h>

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

namespace shardwise::nn {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Raises ValueError if a hook has added or dropped tensors.
void require_count(const HookTensors& tensors, size_t count, const char* kind, const torch::nn::Module& module) {
  if (tensors.size() == count) return;
  throw ValueError(c10::str(
      "shardwise: a ", kind, " of ", module.name(), " was given ", count, " tensors and left ", tensors.size(),
      ". A hook may replace tensors, but not add or drop one: assign to the elements."));
}

/// Calls the hooks of a list with tensors that they may replace, and with their other arguments.
template <typename Function, typename... Others>
void run_hooks(
    const HookList<Function>& hooks, const char* kind, torch::nn::Module& module, HookTensors& tensors,
    const Others&... others) {
  const auto count = tensors.size();
  for (const auto& hook : hooks) {
    if (hook->removed) continue;
    hook->function(module, tensors, others...);
    require_count(tensors, count, kind, module);
  }
}

/// Carries what a node does in backward, in its saved data.
struct Carrier : torch::CustomClassHolder {
  using Arrived = std::function<variable_list(variable_list)>;
  explicit Carrier(Arrived act) : arrived(std::move(act)) {}

  Arrived arrived;
};

/// Returns its inputs. torch makes views of them, so that a change in place, which the node would miss, is an error.
struct HookedTensors : torch::autograd::Function<HookedTensors> {
  static variable_list forward(AutogradContext* context, at::TensorList tensors, c10::intrusive_ptr<Carrier> carrier) {
    context->set_materialize_grads(false);
    context->saved_data["call"] = c10::IValue::make_capsule(std::move(carrier));
    return tensors.vec();
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto carrier = c10::static_intrusive_pointer_cast<Carrier>(context->saved_data["call"].toCapsule());
    auto results = base::called_by_torch([&] { return carrier->arrived(std::move(gradients)); });
    results.emplace_back(); // for the carrier, which is an argument too
    return results;
  }
};

} // namespace

/// The backward hooks of one call of a module. The inputs and the outputs of the call each pass through an autograd
/// node that changes nothing; its backward fires the hooks. The graph owns this object, which does not own the module.
class BackwardCall : public std::enable_shared_from_this<BackwardCall> {
 public:
  BackwardCall(torch::nn::Module& module, std::shared_ptr<const HookLists> lists)
      : module_(&module),
        life_(HookTable::get().life(module)),
        lists_(std::move(lists)) {}

  void pass_inputs(HookTensors& inputs) {
    inputs_ = pass(inputs, &BackwardCall::inputs_arrived);
  }
  void pass_outputs(HookTensors& outputs) {
    outputs_ = pass(outputs, &BackwardCall::outputs_arrived);
  }

 private:
  /// Which tensors of a call need gradients. Hooks get a place for every tensor, autograd only for these.
  struct Differentiable {
    size_t count = 0;
    std::vector<size_t> used;

    HookTensors spread(variable_list gradients) const {
      HookTensors all(count);
      for (size_t i = 0; i < used.size(); ++i) all[used[i]] = std::move(gradients[i]);
      return all;
    }
    variable_list pick(const HookTensors& gradients) const {
      variable_list picked;
      for (const size_t i : used) picked.push_back(gradients[i]);
      return picked;
    }
  };

  /// `arrived`: what the node does in backward. It gets the gradients of the tensors that passed through the node.
  Differentiable pass(HookTensors& tensors, variable_list (BackwardCall::*arrived)(variable_list)) {
    Differentiable differentiable{tensors.size(), {}};
    if (!at::GradMode::is_enabled()) return differentiable;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].defined() && tensors[i].requires_grad()) differentiable.used.push_back(i);
    }
    if (differentiable.used.empty()) return differentiable;
    // A TensorList, because torch looks for variables in no other kind of list.
    const auto used = differentiable.pick(tensors);
    const auto passed = HookedTensors::apply(
        at::TensorList(used), c10::make_intrusive<Carrier>(std::bind_front(arrived, shared_from_this())));
    for (size_t i = 0; i < differentiable.used.size(); ++i) tensors[differentiable.used[i]] = passed[i];
    return differentiable;
  }

  variable_list outputs_arrived(variable_list gradients) {
    const auto alive = life_.lock();
    if (!alive) return gradients;
    auto output_gradients = outputs_.spread(std::move(gradients));
    run_hooks(lists_->backward_pre, "full backward pre-hook", *module_, output_gradients);
    if (inputs_.used.empty()) {
      HookTensors none(inputs_.count);
      run_hooks(lists_->backward, "full backward hook", *module_, none, output_gradients);
      if (std::any_of(none.begin(), none.end(), [](const at::Tensor& gradient) { return gradient.defined(); })) {
        throw Error(c10::str(
            "shardwise: a full backward hook of ", module_->name(),
            " set the gradient of an input, but no input of that call requires a gradient, so it would be lost. Leave "
            "the gradients undefined, or give the module an input that requires a gradient."));
      }
    } else {
      const std::lock_guard lock(mutex_);
      output_gradients_ = output_gradients;
    }
    return outputs_.pick(output_gradients);
  }

  variable_list inputs_arrived(variable_list gradients) {
    std::optional<HookTensors> output_gradients;
    {
      const std::lock_guard lock(mutex_);
      output_gradients.swap(output_gradients_);
    }
    const auto alive = life_.lock();
    // No gradients of the outputs: this backward did not come through the outputs, as can happen in a second
    // derivative.
    if (!alive || !output_gradients) return gradients;
    auto input_gradients = inputs_.spread(std::move(gradients));
    run_hooks(lists_->backward, "full backward hook", *module_, input_gradients, *output_gradients);
    return inputs_.pick(input_gradients);
  }

  torch::nn::Module* module_;
  std::weak_ptr<const void> life_;
  std::shared_ptr<const HookLists> lists_;
  Differentiable inputs_;
  Differentiable outputs_;
  std::mutex mutex_;
  std::optional<HookTensors> output_gradients_;
};

} // namespace shardwise::nn

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
  nn::run_hooks(lists_->forward_pre, "forward pre-hook", module_, inputs);
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
