#pragma once

#include "nn/hooks/hook_table.h"

#include <memory>
#include <mutex>
#include <optional>

namespace shardwise::nn {

/// The backward hooks of one call of a module. The inputs and the outputs of the call each pass through an autograd
/// node that changes nothing; its backward fires the hooks. The graph owns this object, which does not own the module.
class BackwardCall : public std::enable_shared_from_this<BackwardCall> {
 public:
  BackwardCall(torch::nn::Module& module, std::shared_ptr<const HookLists> lists);

  void pass_inputs(HookTensors& inputs);
  void pass_outputs(HookTensors& outputs);

  /// What the two nodes do in backward. Each gets the gradients of the tensors that passed through it.
  torch::autograd::variable_list outputs_arrived(torch::autograd::variable_list gradients);
  torch::autograd::variable_list inputs_arrived(torch::autograd::variable_list gradients);

 private:
  /// Which tensors of a call need gradients. Hooks see a place for every tensor, autograd only these.
  struct Differentiable {
    size_t count = 0;
    std::vector<size_t> used;

    HookTensors spread(torch::autograd::variable_list gradients) const;
    torch::autograd::variable_list pick(const HookTensors& gradients) const;
  };

  Differentiable pass(HookTensors& tensors, bool outputs);
  void fire(HookTensors& input_gradients, const HookTensors& output_gradients);

  torch::nn::Module* module_;
  std::weak_ptr<const void> life_;
  std::shared_ptr<const HookLists> lists_;
  Differentiable inputs_;
  Differentiable outputs_;
  std::mutex mutex_;
  std::optional<HookTensors> output_gradients_;
};

} // namespace shardwise::nn
