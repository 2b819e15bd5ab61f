#pragma once

#include <shardwise/export.h>

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardwise::transport {

/// Whether add_up() knows the dtype; a mean is of floating point numbers only.
SHARDWISE_API bool can_add_up(at::ScalarType dtype, bool mean);

/// Fills `output` with the sums of `elements` elements at each of `terms`, added in their order; fp16 and bf16 are
/// added in float and rounded once. A mean is the sum divided by their number before it is rounded. `output` may be one
/// of the terms.
SHARDWISE_API void add_up(
    void* output, const std::vector<const std::byte*>& terms, int64_t elements, at::ScalarType dtype, bool mean);

/// Divides floating point numbers in place.
void divide(void* numbers, int64_t elements, at::ScalarType dtype, int64_t divisor);

} // namespace shardwise::transport
