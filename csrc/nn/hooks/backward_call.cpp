#include "nn/hooks/backward_call.h"

#include "base/caller_error.h"
#include "nn/hooks/hook_count.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

namespace shardwise::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// Carries a call in the saved data of an autograd node.
struct Carrier : torch::CustomClassHolder {
  Carrier(std::shared_ptr<BackwardCall> carried, bool of_outputs) : call(std::move(carried)), outputs(of_outputs) {}

  std::shared_ptr<BackwardCall> call;
  bool outputs;
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
    auto results = base::called_by_torch([&] {
      return carrier->outputs ? carrier->call->outputs_arrived(std::move(gradients))
                              : carrier->call->inputs_arrived(std::move(gradients));
    });
    results.emplace_back(); // for the carrier, which is an argument too
    return results;
  }
};

} // namespace

HookTensors BackwardCall::Differentiable::spread(variable_list gradients) const {
  HookTensors all(count);
  for (size_t i = 0; i < used.size(); ++i) all[used[i]] = std::move(gradients[i]);
  return all;
}

variable_list BackwardCall::Differentiable::pick(const HookTensors& gradients) const {
  variable_list picked;
  for (const size_t i : used) picked.push_back(gradients[i]);
  return picked;
}

BackwardCall::BackwardCall(torch::nn::Module& module, std::shared_ptr<const HookLists> lists)
    : module_(&module),
      life_(HookTable::get().life(module)),
      lists_(std::move(lists)) {}

BackwardCall::Differentiable BackwardCall::pass(HookTensors& tensors, bool outputs) {
  Differentiable differentiable{tensors.size(), {}};
  if (!at::GradMode::is_enabled()) return differentiable;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].defined() && tensors[i].requires_grad()) differentiable.used.push_back(i);
  }
  if (differentiable.used.empty()) return differentiable;
  // A TensorList, because torch looks for variables in no other kind of list.
  const auto used = differentiable.pick(tensors);
  const auto passed =
      HookedTensors::apply(at::TensorList(used), c10::make_intrusive<Carrier>(shared_from_this(), outputs));
  for (size_t i = 0; i < differentiable.used.size(); ++i) tensors[differentiable.used[i]] = passed[i];
  return differentiable;
}

void BackwardCall::pass_inputs(HookTensors& inputs) {
  inputs_ = pass(inputs, /*outputs=*/false);
}

void BackwardCall::pass_outputs(HookTensors& outputs) {
  outputs_ = pass(outputs, /*outputs=*/true);
}

variable_list BackwardCall::outputs_arrived(variable_list gradients) {
  const auto alive = life_.lock();
  if (!alive) return gradients;
  auto output_gradients = outputs_.spread(std::move(gradients));
  for (const auto& hook : lists_->backward_pre) {
    if (hook->removed) continue;
    hook->function(*module_, output_gradients);
    require_count(output_gradients, outputs_.count, "full backward pre-hook", *module_);
  }
  if (inputs_.used.empty()) {
    HookTensors none(inputs_.count);
    fire(none, output_gradients);
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

variable_list BackwardCall::inputs_arrived(variable_list gradients) {
  std::optional<HookTensors> output_gradients;
  {
    const std::lock_guard lock(mutex_);
    output_gradients.swap(output_gradients_);
  }
  const auto alive = life_.lock();
  // No gradients of the outputs: this backward did not come through the outputs, as can happen in a second derivative.
  if (!alive || !output_gradients) return gradients;
  auto input_gradients = inputs_.spread(std::move(gradients));
  fire(input_gradients, *output_gradients);
  return inputs_.pick(input_gradients);
}

void BackwardCall::fire(HookTensors& input_gradients, const HookTensors& output_gradients) {
  for (const auto& hook : lists_->backward) {
    if (hook->removed) continue;
    hook->function(*module_, input_gradients, output_gradients);
    require_count(input_gradients, inputs_.count, "full backward hook", *module_);
  }
}

} // namespace shardwise::nn
