#pragma once

#include <c10/core/TensorOptions.h>

namespace shardwise::base {

/// For a tensor that this thread itself reads or fills, whatever device a program made the usual one.
inline at::TensorOptions on_host(at::ScalarType dtype) {
  return at::TensorOptions(at::kCPU).dtype(dtype);
}

} // namespace shardwise::base
