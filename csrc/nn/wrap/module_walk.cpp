#include "nn/wrap/module_walk.h"

#include <algorithm>

namespace shardwise::nn {

void for_each_tensor(
    const torch::nn::Module& module,
    const std::function<void(const std::string& name, const at::Tensor& tensor, bool is_parameter)>& visit,
    const std::string& prefix) {
  const auto tell = [&](const auto& tensors, bool is_parameter) {
    for (const auto& entry : tensors) {
      if (entry.value().defined()) visit(prefix + entry.key(), entry.value(), is_parameter);
    }
  };
  tell(module.named_parameters(/*recurse=*/false), true);
  tell(module.named_buffers(/*recurse=*/false), false);
  for (const auto& child : module.named_children()) for_each_tensor(*child.value(), visit, prefix + child.key() + ".");
}

ModuleTensors walk(const std::vector<const torch::nn::Module*>& modules) {
  ModuleTensors tensors;
  TensorCollection parameters(tensors.parameters);
  TensorCollection buffers(tensors.buffers);
  for (const auto* module : modules) {
    for_each_tensor(*module, [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
      (is_parameter ? parameters : buffers).add(name, tensor);
    });
  }
  return tensors;
}

ModuleTensors walk(const torch::nn::Module& module) {
  return walk(std::vector{&module});
}

bool is_among(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const auto& other) { return other.is_same(tensor); });
}

} // namespace shardwise::nn
