#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>

namespace c10 {
class OperatorHandle;
}

namespace shardwise::nn {

/// Whether results of the operation, or what it writes, depend on several places along the cut dimension, or on which
/// places they are. On a piece they are others than on the whole. `dimension` is the cut one of this tensor, which is
/// one of the arguments; without it, each may be.
bool mixes_places(
    const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> arguments, const at::Tensor& tensor,
    std::optional<int64_t> dimension);

/// Whether what is computed from it gets a gradient.
bool is_followed_by_autograd(const at::Tensor& tensor);

/// Whether it is the sum of all elements of a tensor with so many dimensions. Its gradient is right on each piece.
bool sums_all(const c10::OperatorHandle& operation, c10::ArrayRef<c10::IValue> arguments, int64_t dimensions);

} // namespace shardwise::nn
