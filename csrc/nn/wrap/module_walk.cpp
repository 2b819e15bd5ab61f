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
  for (const auto& entry : module.named_parameters(/*recurse=*/false)) visit(prefix + entry.key(), entry.value(), true);
  for (const auto& entry : module.named_buffers(/*recurse=*/false)) visit(prefix + entry.key(), entry.value(), false);
  for (const auto& child : module.named_children()) walk_below(*child.value(), prefix + child.key() + ".", visit);
}

} // namespace

void for_each_tensor(
    const torch::nn::Module& module,
    const std::function<void(const std::string& name, const at::Tensor& tensor, bool is_parameter)>& visit) {
  walk_below(module, "", [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    if (tensor.defined()) visit(name, tensor, is_parameter);
  });
}

ModuleTensors walk(const torch::nn::Module& module) {
  ModuleTensors tensors;
  Collection parameters(tensors.parameters);
  Collection buffers(tensors.buffers);
  for_each_tensor(module, [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    (is_parameter ? parameters : buffers).add(name, tensor);
  });
  return tensors;
}

void add_all(const ModuleTensors& from, ModuleTensors& to) {
  const auto add = [](const std::vector<engine::NamedTensor>& source, std::vector<engine::NamedTensor>& target) {
    std::vector<engine::NamedTensor> merged;
    Collection collection(merged);
    for (const auto* list : std::initializer_list<const std::vector<engine::NamedTensor>*>{&target, &source}) {
      for (const auto& tensor : *list) {
        for (const auto& name : tensor.names) collection.add(name, tensor.tensor);
      }
    }
    target = std::move(merged);
  };
  add(from.parameters, to.parameters);
  add(from.buffers, to.buffers);
}

void add_parameter(const std::string& name, const at::Tensor& tensor, ModuleTensors& to) {
  for (auto& known : to.parameters) {
    if (known.tensor.is_same(tensor)) return known.names.push_back(name);
  }
  to.parameters.push_back({.names = {name}, .tensor = tensor});
}

} // namespace shardwise::nn
