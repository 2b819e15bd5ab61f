#pragma once

#include <shardwise/detail/export.h>

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardwise::transport {

/// Whether add_up() supports the dtype. Means are for floating-point numbers only.
SHARDWISE_API bool can_add_up(at::ScalarType dtype, bool mean);

/// Adds `elements` elements of each of `terms`, in the order of the terms, into `output`, which may be one of the
/// terms. fp16 and bf16 are added in float and rounded once. A mean is divided by the number of terms before rounding.
SHARDWISE_API void add_up(
    void* output, const std::vector<const std::byte*>& terms, int64_t elements, at::ScalarType dtype, bool mean);

/// Divides floating-point numbers in place.
void divide(void* numbers, int64_t elements, at::ScalarType dtype, int64_t divisor);

} // namespace shardwise::transport
