#pragma once

#include <shardwise/detail/export.h>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

// Moves pieces of parameters and gradients without torch's dispatcher: by a loop on a CPU, by one launch on a CUDA
// device. Nothing else in shardwise has kernels.

namespace shardwise::kernels {

/// Moves `count` runs of `length` elements each. The strides are the distances between the beginnings of runs, in
/// elements.
struct Move {
  const void* from;
  void* to;
  int64_t count;
  int64_t length;
  int64_t from_stride;
  int64_t to_stride;
};

/// Whether tensors on this device can be moved here: always on a CPU, on a CUDA device if nvcc built the kernels and
/// they run there. A device is tried when it is first asked for, which is when a unit is made.
SHARDWISE_API bool has_kernels(at::Device device);

/// Copies elements of `itemsize` bytes. On a device all moves run on the current stream, in one launch or a few. The
/// moves need not outlive the call, so it may be captured in a graph.
SHARDWISE_API void copy(at::Device device, int64_t itemsize, const std::vector<Move>& moves);

/// Whether scale() supports this dtype.
SHARDWISE_API bool can_scale(at::ScalarType dtype);

/// Like copy(), but casts and multiplies, with the same bits as at::mul in the wider of the two dtypes. Both must be
/// ones that can_scale() accepts.
SHARDWISE_API void scale(
    at::Device device, at::ScalarType from, at::ScalarType to, double factor, const std::vector<Move>& moves);

} // namespace shardwise::kernels
