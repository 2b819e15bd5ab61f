#pragma once

#include <shardwise/export.h>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace shardwise::files {

/// The name that safetensors has for a dtype, such as F32.
/// Raises ValueError, with the parameter's name, for a dtype that it has none for.
SHARDWISE_API std::string dtype_name(c10::ScalarType dtype, const std::string& parameter);

/// The dtype of this name; nothing where torch has none.
SHARDWISE_API std::optional<c10::ScalarType> dtype_of(std::string_view name);

/// How many elements of safetensors, along the last dimension, are one of torch's.
constexpr int64_t packed_elements(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Float4_e2m1fn_x2 ? 2 : 1;
}

} // namespace shardwise::files
