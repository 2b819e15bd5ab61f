#include "nn/wrap/module_walk.h"

#include <algorithm>

namespace shardwise::nn {

std::string name_in(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

void for_each_tensor(
    const torch::nn::Module& module,
    const std::function<void(const std::string& name, const at::Tensor& tensor, bool is_parameter)>& visit) {
  module.apply([&](const std::string& path, const torch::nn::Module& part) {
    const auto tell = [&](const auto& tensors, bool is_parameter) {
      for (const auto& entry : tensors) {
        if (entry.value().defined()) visit(name_in(path, entry.key()), entry.value(), is_parameter);
      }
    };
    tell(part.named_parameters(/*recurse=*/false), true);
    tell(part.named_buffers(/*recurse=*/false), false);
  });
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
