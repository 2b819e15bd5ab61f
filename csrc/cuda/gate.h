#pragma once

#include "base/gate.h"

#include <c10/core/Device.h>

#include <memory>

namespace shardwise::cuda {

/// Whether this build has gates for CUDA.
bool has_gates();
/// Raises c10::Error if the driver has none.
std::unique_ptr<base::Gate> make_gate(c10::Device device);

} // namespace shardwise::cuda
