#pragma once

#include <shardwise/export.h>

#include <ATen/core/Tensor.h>

namespace shardwise::comm {

/// A vector of zeros for collectives: where a process group of this process goes through shared memory, one that the
/// other ranks can read where it lies; an ordinary one else, and on other devices.
SHARDWISE_API at::Tensor shared_zeros(int64_t numel, const at::TensorOptions& options);

} // namespace shardwise::comm
