#pragma once

#include <shardwise/export.h>

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

// What moves pieces of parameters and gradients without the dispatcher: one loop on a CPU, one launch on a CUDA device.
// Nothing else in shardwise has kernels.

namespace shardwise::cuda {

/// `count` runs of `length` elements each; they begin so many elements after each other.
struct Move {
  const void* from;
  void* to;
  int64_t count;
  int64_t length;
  int64_t from_stride;
  int64_t to_stride;
};

/// Whether there are kernels for tensors on this device: on every CPU; on CUDA devices where nvcc built them.
SHARDWISE_API bool has_kernels(at::DeviceType device);

/// Copies elements of `itemsize` bytes as they are. On a device all of these run on the current stream, in one launch
/// or a few; the moves need not outlive the call, so that it may be captured in a graph.
SHARDWISE_API void copy(at::Device device, int64_t itemsize, const std::vector<Move>& moves);

/// Whether there is a kernel that scales numbers of this dtype, or to it.
SHARDWISE_API bool can_scale(at::ScalarType dtype);

/// The same for numbers, which are cast and multiplied, with the bits that at::mul gives for the wider of the two
/// dtypes. Both are such that can_scale().
SHARDWISE_API void scale(
    at::Device device, at::ScalarType from, at::ScalarType to, double factor, const std::vector<Move>& moves);

} // namespace shardwise::cuda
