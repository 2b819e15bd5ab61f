#include "nn/wrap/module_walk.h"

#include <unordered_map>

namespace shardwise::nn {
namespace {

/// Collects tensors by identity: one that is met again gets one more name.
class Collection {
 public:
  explicit Collection(std::vector<engine::NamedTensor>& tensors) : tensors_(tensors) {}

  void add(const std::string& name, const at::Tensor& tensor) {
    const auto [entry, is_new] = index_.try_emplace(tensor.unsafeGetTensorImpl(), tensors_.size());
    if (is_new) {
      tensors_.push_back({.names = {name}, .tensor = tensor});
    } else {
      tensors_[entry->second].names.push_back(name);
    }
  }

 private:
  std::vector<engine::NamedTensor>& tensors_;
  std::unordered_map<at::TensorImpl*, size_t> index_;
};

using Visit = std::function<void(const std::string&, const at::Tensor&, bool)>;

void walk_below(const torch::nn::Module& module, const std::string& prefix, const Visit& visit) {
  const auto tell = [&](const auto& tensors, bool is_parameter) {
    for (const auto& entry : tensors) {
      if (entry.value().defined()) visit(prefix + entry.key(), entry.value(), is_parameter);
    }
  };
  tell(module.named_parameters(/*recurse=*/false), true);
  tell(module.named_buffers(/*recurse=*/false), false);
  for (const auto& child : module.named_children()) walk_below(*child.value(), prefix + child.key() + ".", visit);
}

} // namespace

void for_each_tensor(
    const torch::nn::Module& module,
    const std::function<void(const std::string& name, const at::Tensor& tensor, bool is_parameter)>& visit) {
  walk_below(module, "", visit);
}

ModuleTensors walk(const std::vector<const torch::nn::Module*>& modules) {
  ModuleTensors tensors;
  Collection parameters(tensors.parameters);
  Collection buffers(tensors.buffers);
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

void add_parameter(const std::string& name, const at::Tensor& tensor, ModuleTensors& to) {
  for (auto& known : to.parameters) {
    if (known.tensor.is_same(tensor)) return known.names.push_back(name);
  }
  to.parameters.push_back({.names = {name}, .tensor = tensor});
}

} // namespace shardwise::nn
