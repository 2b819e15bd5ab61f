#pragma once

#include "kernels/moves.h"

#include <cuda_runtime_api.h>

namespace shardwise::cuda {

// For the current device. `word` is 1, 2, 4, 8 or 16 bytes: lengths and strides are counted in it, none is 0, and
// memory is aligned to it.
cudaError_t launch_copy(cudaStream_t stream, int64_t word, const std::vector<kernels::Move>& moves);
/// Whether the driver can run the kernels on the current device: an error where it is too old, or where they were built
/// for other architectures.
cudaError_t try_kernels();
cudaError_t launch_scale(
    cudaStream_t stream, at::ScalarType from, at::ScalarType to, double factor,
    const std::vector<kernels::Move>& moves);

} // namespace shardwise::cuda
