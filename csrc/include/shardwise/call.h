#pragma once

#include <shardwise/hooks.h>
#include <shardwise/hooks_detail.h>

#include <type_traits>
#include <utility>

namespace torch::nn {
template <typename Contained>
class ModuleHolder;
}

namespace shardwise {

/// module.forward(args...) with the module's hooks, whatever the types of arguments and result. The module is given
/// itself, or as a holder, a shared_ptr or a pointer to it. Without hooks it costs a look at a table.
///
/// Where there are hooks, forward gets copies of the arguments that hold tensors; all others are passed through.
/// A forward that returns a reference to tensors returns them by value here.
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

  template <typename... Args>
  decltype(auto) operator()(Args&&... args) {
    return call(*this->get(), std::forward<Args>(args)...);
  }
};

} // namespace shardwise

/// Use it like TORCH_MODULE(Name): it makes the holder Name of the class NameImpl, and name(x) fires hooks.
/// name->forward(x) does not.
#define SHARDWISE_MODULE(Name) SHARDWISE_MODULE_IMPL(Name, Name##Impl)
#define SHARDWISE_MODULE_IMPL(Name, ImplType)                \
  class Name : public ::shardwise::HookedHolder<ImplType> {  \
   public:                                                   \
    using ::shardwise::HookedHolder<ImplType>::HookedHolder; \
    using Impl [[maybe_unused]] = ImplType;                  \
  }
