#pragma once

#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <concepts>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace shardwise {

/// The options of activation_checkpoint(). Everything has a default.
struct SHARDWISE_API ActivationCheckpointOptions {
  /// Run fn again from the random state of its first run, so that dropout drops the same: the states of the default
  /// generators of the CPU, of the inputs' devices and of the current device. These belong to the process: ranks that
  /// are threads and draw from them at the same time disturb each other. With false no copies of the states are made,
  /// for an fn that draws nothing, or from its own generators.
  TORCH_ARG(bool, preserve_rng_state) = true;
};

namespace detail {

using Tensors = std::vector<at::Tensor>;
using ActivationCheckpointFunction = std::function<Tensors(const Tensors&)>;

SHARDWISE_API Tensors activation_checkpoint(
    const ActivationCheckpointOptions& options, ActivationCheckpointFunction fn, const Tensors& inputs);

/// Packs a result of fn into a list of tensors, and unpacks it again.
template <typename Result>
struct Packed;

template <>
struct Packed<at::Tensor> {
  static void pack(const at::Tensor& result, Tensors& list) {
    list.push_back(result);
  }
  static at::Tensor unpack(const at::Tensor*& next) {
    return *next++;
  }
};

template <typename... Parts>
struct Packed<std::tuple<Parts...>> {
  static void pack(const std::tuple<Parts...>& result, Tensors& list) {
    std::apply([&](const auto&... part) { (Packed<Parts>::pack(part, list), ...); }, result);
  }
  static std::tuple<Parts...> unpack([[maybe_unused]] const at::Tensor*& next) {
    return std::tuple<Parts...>{Packed<Parts>::unpack(next)...};
  }
};

template <typename Result>
struct Whole {
  static Tensors pack(const Result& result) {
    Tensors list;
    Packed<Result>::pack(result, list);
    return list;
  }
  static Result unpack(const Tensors& list) {
    const at::Tensor* next = list.data();
    return Packed<Result>::unpack(next);
  }
};

template <>
struct Whole<Tensors> {
  static Tensors pack(Tensors result) {
    return result;
  }
  static Tensors unpack(Tensors list) {
    return list;
  }
};

template <typename Function, size_t... I>
auto call(Function& fn, const Tensors& inputs, std::index_sequence<I...>) {
  return std::invoke(fn, inputs[I]...);
}

} // namespace detail

/// Runs fn(inputs...) without the memory of the activations inside, and runs it again in backward to compute them anew:
/// less memory for more time. The result and the gradients are those of a plain call.
///
///   auto y = shardwise::activation_checkpoint([&](const at::Tensor& x) { return block->forward(x); }, x);
///
/// fn takes the inputs as `const at::Tensor&` and returns a Tensor, a std::vector<Tensor>, or a std::tuple of Tensors
/// and of such tuples, as an LSTM does. It is any callable: a lambda or a module holder. A copy of it lives until the
/// graph is gone, or a backward without retain_graph is done; what it refers to must live as long.
///
/// Gradients reach the inputs, every parameter that fn uses, and any other tensor with a gradient that it captures. A
/// checkpoint gives each of them one gradient, through the ordinary graph: hooks fire once, and backward(inputs),
/// autograd::grad and retain_graph work (each backward runs fn again). Only fn reads the memory of parameters.
/// Gradients are first added up inside, so that the last bit may differ for a tensor with three or more uses, some of
/// them outside.
///
/// The second run has the grad mode, autocast and random state (see ActivationCheckpointOptions) of the first;
/// autocast's cache is off in both. Activations that the graph holds are dropped when the first run is done; nested
/// checkpoints hold less until then. Without grad mode this is a plain call.
///
/// fn must do the same both times:
/// - its side effects happen twice (the running statistics of a BatchNorm);
/// - an input that is changed in place after the call is an error in backward, as for anything that autograd saves.
///   Nothing notices a change of a captured tensor;
/// - other shapes, another number of outputs, or other tensors with a gradient than the first time are an Error;
/// - hooks that fn puts on its own activations fire once, in backward.
/// What fn throws comes through unchanged, from here or from backward().
///
/// An output may be changed in place. One that shares memory with an input, a parameter or another output is copied; an
/// input, a parameter, or a tensor without gradient that fn returns is returned itself. An output without gradient
/// owns no activations but its own memory.
///
/// Gradients of gradients are refused: backward with create_graph raises Error. Call fn directly there.
template <typename Function, typename... Inputs>
requires(std::convertible_to<const Inputs&, const at::Tensor&>&&...) auto activation_checkpoint(
    const ActivationCheckpointOptions& options, Function fn, const Inputs&... inputs) {
  using Indices = std::index_sequence_for<Inputs...>;
  using Result = std::remove_cvref_t<decltype(detail::call(fn, std::declval<const detail::Tensors&>(), Indices()))>;
  using Whole = detail::Whole<Result>;
  auto outputs = detail::activation_checkpoint(
      options,
      [fn = std::move(fn)](const detail::Tensors& tensors) mutable {
        return Whole::pack(detail::call(fn, tensors, Indices()));
      },
      {inputs...});
  return Whole::unpack(std::move(outputs));
}

/// The same with the default options.
template <typename Function, typename... Inputs>
requires(!std::convertible_to<const Function&, const ActivationCheckpointOptions&>) auto activation_checkpoint(
    Function fn, const Inputs&... inputs) {
  return activation_checkpoint(ActivationCheckpointOptions(), std::move(fn), inputs...);
}

} // namespace shardwise
