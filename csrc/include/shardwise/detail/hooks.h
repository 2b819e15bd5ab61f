#pragma once

// The implementation of call(). Not for use by programs.
#include <shardwise/hooks.h>

#include <array>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace shardwise::nn {
class BackwardCall;
struct HookLists;
} // namespace shardwise::nn

namespace shardwise::detail {

template <typename Callee>
auto& module_of(Callee& callee) {
  if constexpr (std::is_base_of_v<torch::nn::Module, std::remove_cv_t<Callee>>) {
    return callee;
  } else {
    return *callee;
  }
}

/// Finds the tensors in a value. visit() hands each to a function that reads or replaces it, always in the same order.
template <typename T>
struct TensorsIn {
  static constexpr bool any = false;
};

template <>
struct TensorsIn<at::Tensor> {
  static constexpr bool any = true;
  template <typename Function>
  static void visit(at::Tensor& tensor, Function& function) {
    function(tensor);
  }
};

template <>
struct TensorsIn<std::optional<at::Tensor>> {
  static constexpr bool any = true;
  template <typename Function>
  static void visit(std::optional<at::Tensor>& value, Function& function) {
    at::Tensor tensor = value.value_or(at::Tensor());
    function(tensor);
    if (value || tensor.defined()) value = std::move(tensor);
  }
};

template <typename T>
struct TensorsIn<std::optional<T>> : TensorsIn<T> {
  template <typename Function>
  static void visit(std::optional<T>& value, Function& function) {
    if (value) TensorsIn<T>::visit(*value, function);
  }
};

template <typename T>
struct TensorsIn<std::vector<T>> : TensorsIn<T> {
  template <typename Function>
  static void visit(std::vector<T>& values, Function& function) {
    for (auto& value : values) TensorsIn<T>::visit(value, function);
  }
};

template <typename... Ts>
struct TensorsIn<std::tuple<Ts...>> {
  static constexpr bool any = (TensorsIn<std::decay_t<Ts>>::any || ...);
  template <typename Function>
  static void visit(std::tuple<Ts...>& values, Function& function) {
    std::apply([&](auto&... value) { (visit_one(value, function), ...); }, values);
  }

 private:
  template <typename T, typename Function>
  static void visit_one(T& value, Function& function) {
    if constexpr (TensorsIn<T>::any) TensorsIn<T>::visit(value, function);
  }
};

template <typename A, typename B>
struct TensorsIn<std::pair<A, B>> {
  static constexpr bool any = TensorsIn<A>::any || TensorsIn<B>::any;
  template <typename Function>
  static void visit(std::pair<A, B>& values, Function& function) {
    if constexpr (TensorsIn<A>::any) TensorsIn<A>::visit(values.first, function);
    if constexpr (TensorsIn<B>::any) TensorsIn<B>::visit(values.second, function);
  }
};

template <typename T, size_t N>
struct TensorsIn<std::array<T, N>> : TensorsIn<T> {
  template <typename Function>
  static void visit(std::array<T, N>& values, Function& function) {
    for (auto& value : values) TensorsIn<T>::visit(value, function);
  }
};

template <typename T>
HookTensors gather(T& value) {
  HookTensors tensors;
  if constexpr (TensorsIn<T>::any) {
    const auto take = [&](at::Tensor& tensor) { tensors.push_back(tensor); };
    TensorsIn<T>::visit(value, take);
  }
  return tensors;
}

template <typename T>
void scatter(const HookTensors& tensors, T& value) {
  if constexpr (TensorsIn<T>::any) {
    auto next = tensors.begin();
    const auto put = [&](at::Tensor& tensor) { tensor = *next++; };
    TensorsIn<T>::visit(value, put);
  }
}

/// Whether the module has hooks.
SHARDWISE_API bool has_hooks(torch::nn::Module& module);

/// The hooks of one call.
class SHARDWISE_API HookedCall {
 public:
  explicit HookedCall(torch::nn::Module& module);
  void begin(HookTensors& inputs);
  void end(HookTensors& outputs);
  /// To be called after an exception, whoever threw it.
  void fail();

 private:
  torch::nn::Module& module_;
  std::shared_ptr<const nn::HookLists> lists_;
  std::shared_ptr<nn::BackwardCall> backward_;
  std::vector<std::shared_ptr<nn::HookBase>> called_;
};

/// Arguments with tensors are copied, so that the tensors can be replaced; others stay references.
template <typename T>
using Held = std::conditional_t<TensorsIn<std::decay_t<T>>::any, std::decay_t<T>, T&&>;

template <typename T>
using Result = std::conditional_t<TensorsIn<std::decay_t<T>>::any, std::decay_t<T>, T>;

template <typename Forward, typename... Args>
auto call_with_hooks(torch::nn::Module& module, const Forward& forward, Args&&... args)
    -> Result<std::invoke_result_t<const Forward&, Args&&...>> {
  using Returned = Result<std::invoke_result_t<const Forward&, Args&&...>>;
  if (!has_hooks(module)) return forward(std::forward<Args>(args)...);
  HookedCall hooks(module);
  try {
    std::tuple<Held<Args>...> arguments(std::forward<Args>(args)...);
    auto inputs = gather(arguments);
    hooks.begin(inputs);
    scatter(inputs, arguments);
    const auto run = [&](auto&... values) -> decltype(auto) { return forward(static_cast<Args&&>(values)...); };
    if constexpr (std::is_void_v<Returned>) {
      std::apply(run, arguments);
      HookTensors none;
      hooks.end(none);
    } else {
      Returned result = std::apply(run, arguments);
      auto outputs = gather(result);
      hooks.end(outputs);
      scatter(outputs, result);
      return static_cast<Returned&&>(result);
    }
  } catch (...) {
    hooks.fail();
    throw;
  }
}

} // namespace shardwise::detail
