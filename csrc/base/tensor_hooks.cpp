#include "base/tensor_hooks.h"

#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace shardwise::base {

torch::autograd::hooks_list* live_hooks_list(const at::Tensor& tensor) {
  const auto& list = torch::autograd::impl::materialize_autograd_meta(tensor)->cpp_hooks_list_;
  return list.use_count() > 1 ? list.get() : nullptr;
}

void add_hook(const at::Tensor& leaf, std::function<at::TensorBase(const at::TensorBase&)> hook) {
  if (live_hooks_list(leaf) == nullptr) torch::autograd::impl::create_cpp_hook(leaf);
  live_hooks_list(leaf)->push_back(std::move(hook));
}

} // namespace shardwise::base
