#include "nn/touch/touch.h"

#include "group/leaf_storage.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/addmm_ops.h>
#include <ATen/ops/bmm_ops.h>
#include <ATen/ops/conv2d_ops.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/embedding_ops.h>
#include <ATen/ops/layer_norm_ops.h>
#include <ATen/ops/linear_ops.h>
#include <ATen/ops/matmul_ops.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/native_layer_norm_backward_ops.h>
#include <ATen/ops/rms_norm_ops.h>
#include <ATen/ops/t_ops.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <string>
#include <type_traits>

// The operations of which most models consist. If only full parameters among the arguments are watched, and nothing is
// to be cast, the arguments do not go through a stack. Otherwise the operation takes the way of all others.
namespace shardwise::nn {
namespace {

/// Whether this holds for an argument, if it is a keyed tensor.
template <typename Argument, typename Holds>
C10_ALWAYS_INLINE bool if_keyed(const Argument& argument, const Holds& holds) {
  if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
    return !argument || if_keyed(*argument, holds);
  } else if constexpr (std::is_same_v<Argument, at::Tensor>) {
    return !argument.defined() || !has_touch_key(argument) || holds(argument);
  } else {
    return true;
  }
}

template <typename Operation, typename = typename Operation::schema>
struct Unboxed;

template <typename Operation, typename Result, typename... Arguments>
struct Unboxed<Operation, Result(Arguments...)> {
  static std::string name() {
    const std::string overload = Operation::overload_name;
    return Operation::name + (overload.empty() ? "" : "." + overload);
  }

  static Result run(c10::DispatchKeySet keys, Arguments... arguments) {
    static const auto operation =
        c10::Dispatcher::singleton().findSchemaOrThrow(Operation::name, Operation::overload_name);
    if (!c10::impl::tls_is_dispatch_key_included(kTouchKey)) {
      const c10::impl::ExcludeDispatchKeyGuard not_a_touch(kTouchKey);
      Touches touches;
      // Whether the operation runs as torch has it, and the listener of this tensor, if there is one, has nothing to do
      // with other arguments.
      const auto read = [&](const at::Tensor& tensor) C10_ALWAYS_INLINE_ATTRIBUTE {
        if (has_substitute(tensor)) return false;
        auto listener = tensor.has_storage() ? listener_of(tensor) : nullptr;
        if (listener == nullptr || listener->needs_arguments()) return false;
        touches.add(std::move(listener), {operation, {}, tensor, /*written=*/false});
        return true;
      };
      // One argument may have freed the memory of another.
      const auto is_there = [](const at::Tensor& tensor) { return !group::is_freed(tensor); };
      if ((if_keyed(arguments, read) && ...) && (if_keyed(arguments, is_there) && ...)) {
        try {
          return Operation::redispatch(
              keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTouchKey), arguments...);
        } catch (const c10::Error&) {
          // It says why torch refused the operation.
          return run_boxed(operation, keys, std::forward<Arguments>(arguments)...);
        }
      }
    }
    return run_boxed(operation, keys, std::forward<Arguments>(arguments)...);
  }

 private:
  /// The way of all operations.
  static Result run_boxed(const c10::OperatorHandle& operation, c10::DispatchKeySet keys, Arguments... arguments) {
    static const auto boxed = c10::KernelFunction::makeFromBoxedFunction<&run_touched>();
    return boxed.call<Result, Arguments...>(operation, keys, std::forward<Arguments>(arguments)...);
  }
};

template <typename... Operations>
void add(torch::Library& library) {
  (library.impl(Unboxed<Operations>::name().c_str(), TORCH_FN(Unboxed<Operations>::run)), ...);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  using namespace at::_ops;
  add<add_Tensor, addmm, bmm, conv2d, convolution_backward, embedding, layer_norm, linear, matmul, mm, mul_Tensor,
      native_layer_norm_backward, rms_norm, t>(library);
}

} // namespace shardwise::nn
