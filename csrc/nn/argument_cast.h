#pragma once

#include <ATen/core/stack.h>

namespace c10 {
struct FunctionSchema;
}

namespace shardwise::nn {

class TouchListener;

/// Casts what an operation is about to read to the dtype that `listener` wants beside its own: floating-point tensors
/// that carry no touch key, that the operation does not write to and that the listener does not spare. Autograd sees
/// it.
void cast_arguments(
    const c10::FunctionSchema& schema, torch::jit::Stack& stack, at::ScalarType dtype, const TouchListener& listener);

} // namespace shardwise::nn
