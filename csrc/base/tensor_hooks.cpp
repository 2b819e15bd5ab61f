#include "base/tensor_hooks.h"

#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

namespace shardwise::base {
namespace {

namespace autograd = torch::autograd;

/// For a tensor with hooks of Python's, which do not mix with the list of C++ hooks.
class HookNode : public autograd::FunctionPreHook {
 public:
  explicit HookNode(TensorHook hook) : hook(std::move(hook)) {}

  autograd::variable_list operator()(const autograd::variable_list& gradients) override {
    const auto changed = hook(gradients.front());
    return changed.defined() ? autograd::variable_list{at::Tensor(changed)} : gradients;
  }

  const TensorHook hook;
};

/// The list of the tensor's C++ hooks; null if there is none, or if Python's hooks took its place.
autograd::hooks_list* live_list(const at::Tensor& tensor) {
  const auto& list = autograd::impl::materialize_autograd_meta(tensor)->cpp_hooks_list_;
  return list.use_count() > 1 ? list.get() : nullptr;
}

} // namespace

void add_hook(const at::Tensor& leaf, TensorHook hook) {
  auto& nodes = autograd::impl::materialize_autograd_meta(leaf)->hooks_;
  if (nodes.empty()) autograd::impl::create_cpp_hook(leaf);
  if (auto* list = live_list(leaf)) {
    list->push_back(std::move(hook));
  } else {
    nodes.push_back(std::make_unique<HookNode>(std::move(hook)));
  }
}

bool has_hooks(const at::Tensor& leaf, bool (*is_other)(const TensorHook& hook)) {
  const auto is_one = [&](const TensorHook& hook) { return hook && !is_other(hook); };
  const auto& nodes = autograd::impl::hooks(leaf);
  if (nodes.empty()) return false;
  if (const auto* list = live_list(leaf)) return std::any_of(list->begin(), list->end(), is_one);
  return std::any_of(nodes.begin(), nodes.end(), [&](const auto& node) {
    const auto* own = dynamic_cast<const HookNode*>(node.get());
    return own == nullptr || is_one(own->hook);
  });
}

at::Tensor run_hooks(const at::Tensor& leaf, at::Tensor gradient, bool (*is_other)(const TensorHook& hook)) {
  const auto run = [&](const TensorHook& hook) {
    if (const auto changed = hook(gradient); changed.defined()) gradient = at::Tensor(changed);
  };
  if (const auto* list = live_list(leaf)) {
    for (size_t i = 0; i < list->size(); ++i) {
      // A copy, for a hook may register another one.
      if (const auto& hook = (*list)[i]; hook && !is_other(hook)) run(TensorHook(hook));
    }
    return gradient;
  }
  for (const auto& node : autograd::impl::hooks(leaf)) {
    if (const auto* own = dynamic_cast<const HookNode*>(node.get())) {
      if (!is_other(own->hook)) run(own->hook);
    } else {
      gradient = (*node)({gradient}).front();
    }
  }
  return gradient;
}

const TensorHook* find_hook(const at::Tensor& leaf, bool (*is_one)(const TensorHook& hook)) {
  if (const auto* list = live_list(leaf)) {
    for (const auto& hook : *list) {
      if (is_one(hook)) return &hook;
    }
  }
  for (const auto& node : autograd::impl::hooks(leaf)) {
    const auto* own = dynamic_cast<const HookNode*>(node.get());
    if (own != nullptr && is_one(own->hook)) return &own->hook;
  }
  return nullptr;
}

} // namespace shardwise::base
