#pragma once

#include "engine/front_end.h"

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

namespace shardwise::nn {

/// The parameters and buffers below modules, each tensor once with all its names, in the order of registration. Takes
/// any module, even on the stack or behind a raw pointer; owns nothing of it.
struct ModuleTensors {
  std::vector<engine::NamedTensor> parameters;
  std::vector<engine::NamedTensor> buffers;
};

/// Collects tensors by identity: one that is met again gets one more name.
class TensorCollection {
 public:
  explicit TensorCollection(std::vector<engine::NamedTensor>& tensors) : tensors_(tensors) {}

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

/// The name of a tensor of the module at this path, as Module::apply() gives it.
std::string name_in(const std::string& path, const std::string& name);

/// Every defined tensor under each of its names: a module's parameters, its buffers, then its children.
void for_each_tensor(
    const torch::nn::Module& module,
    const std::function<void(const std::string& name, const at::Tensor& tensor, bool is_parameter)>& visit);

ModuleTensors walk(const torch::nn::Module& module);
ModuleTensors walk(const std::vector<const torch::nn::Module*>& modules);

/// Whether this tensor itself is one of these.
bool is_among(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor);

} // namespace shardwise::nn
