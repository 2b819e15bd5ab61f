#pragma once

#include <concepts>

namespace torch::nn {
class Module;
}

namespace torch::jit {
struct Module;
}

namespace shardwise::detail {

/// A scripted module, which has no members and no hooks.
template <typename Module>
concept Scripted = std::same_as<Module, torch::jit::Module>;

/// What functions take in place of a module: a module holder, or a shared_ptr or pointer to a module, const or not. As
/// with a const shared_ptr, the module that a const holder holds may change.
template <typename Holder>
concept HoldsModule = requires(const Holder& holder) {
  static_cast<const torch::nn::Module&>(*holder);
};

template <typename Holder>
auto& module_in(const Holder& holder) {
  if constexpr (requires { holder.ptr(); }) {
    return static_cast<torch::nn::Module&>(*holder.ptr());
  } else {
    return static_cast<torch::nn::Module&>(*holder);
  }
}

} // namespace shardwise::detail
