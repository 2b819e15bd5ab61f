#pragma once

#include <shardwise/detail/hooks.h>
#include <shardwise/hooks.h>

#include <utility>

namespace torch::nn {
template <typename Contained>
class ModuleHolder;
}

namespace shardwise {

/// Calls module.forward(args...) and fires the module's hooks, whatever the types of arguments and result. Takes the
/// module itself, or a holder, a shared_ptr or a pointer to it. Without hooks it costs one look at a table.
///
/// With hooks, forward gets copies of the arguments that hold tensors; all others are passed through. If forward
/// returns a reference to tensors, this returns them by value.
template <typename Callee, typename... Args>
decltype(auto) call(Callee&& callee, Args&&... args) {
  auto& module = detail::module_of(callee);
  return detail::call_with_hooks(
      module,
      [&module](auto&&... values) -> decltype(auto) {
        return module.forward(std::forward<decltype(values)>(values)...);
      },
      std::forward<Args>(args)...);
}

/// A holder whose operator() fires hooks. Made by SHARDWISE_MODULE.
template <typename Contained>
class HookedHolder : public torch::nn::ModuleHolder<Contained> {
 public:
  using torch::nn::ModuleHolder<Contained>::ModuleHolder;

  /// shardwise::call() of the module.
  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    return call(*this->get(), std::forward<Args>(args)...);
  }
};

} // namespace shardwise

/// Used like TORCH_MODULE(Name): defines the holder Name of the class NameImpl, whose name(x) fires hooks.
/// name->forward(x) does not.
// NOLINTBEGIN(bugprone-macro-parentheses): the name of a class cannot stand in parentheses.
#define SHARDWISE_MODULE(Name) SHARDWISE_MODULE_IMPL(Name, Name##Impl)
#define SHARDWISE_MODULE_IMPL(Name, ImplType)                \
  class Name : public ::shardwise::HookedHolder<ImplType> {  \
   public:                                                   \
    using ::shardwise::HookedHolder<ImplType>::HookedHolder; \
    using Impl [[maybe_unused]] = ImplType;                  \
  }
// NOLINTEND(bugprone-macro-parentheses)
