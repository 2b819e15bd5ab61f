#include "nn/module_walk.h"

#include <unordered_map>

namespace shardwise::nn {
namespace {

/// Tensors by identity: a tensor that is met again gets one more name.
class Collection {
 public:
  explicit Collection(std::vector<engine::NamedTensor>& tensors) : tensors_(tensors) {}

  void add(const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto [entry, is_new] = index_.try_emplace(tensor.unsafeGetTensorImpl(), tensors_.size());
    if (is_new) {
      tensors_.push_back({{name}, tensor});
    } else {
      tensors_[entry->second].names.push_back(name);
    }
  }

 private:
  std::vector<engine::NamedTensor>& tensors_;
  std::unordered_map<at::TensorImpl*, size_t> index_;
};

void visit(const torch::nn::Module& module, const std::string& prefix, Collection& parameters, Collection& buffers) {
  for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
    parameters.add(prefix + entry.key(), entry.value());
  }
  for (const auto& entry : module.named_buffers(/*recurse=*/false)) buffers.add(prefix + entry.key(), entry.value());
  for (const auto& child : module.named_children()) {
    visit(*child.value(), prefix + child.key() + ".", parameters, buffers);
  }
}

} // namespace

ModuleTensors walk(const torch::nn::Module& module) {
  ModuleTensors tensors;
  Collection parameters(tensors.parameters);
  Collection buffers(tensors.buffers);
  visit(module, "", parameters, buffers);
  return tensors;
}

} // namespace shardwise::nn
