#pragma once

#include <ATen/core/stack.h>

namespace c10 {
struct FunctionSchema;
}

namespace shardwise::nn {

class TouchListener;

/// Casts arguments of an operation that is about to run to `dtype`, which `listener` wants: floating-point tensors that
/// have no touch key, that the operation does not write to, and that the listener does not spare. Autograd sees the
/// casts.
void cast_arguments(
    const c10::FunctionSchema& schema, torch::jit::Stack& stack, at::ScalarType dtype, const TouchListener& listener);

} // namespace shardwise::nn
