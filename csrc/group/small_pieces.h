#pragma once

#include "layout/shards.h"

#include <shardwise/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

// Small pieces on a CPU are moved without the dispatcher: one call of it costs more than the piece itself. Large ones,
// and other devices, are left to torch's kernels, which use all threads.

namespace shardwise::group {

/// Whether a tensor's elements lie on a CPU and are few.
SHARDWISE_API bool is_small(const at::Tensor& tensor);

/// The elements of a contiguous tensor that a cut gives to a rank: runs at equal distances.
struct Runs {
  int64_t count = 0;
  int64_t length = 0;
  int64_t stride = 0;
  int64_t start = 0;
};
SHARDWISE_API Runs runs_of(const layout::Cut& cut, int64_t rank);

/// Writes a piece, which lies at element `offset` of `part`, to its place in `whole`. Same dtype; both contiguous.
SHARDWISE_API void put_runs(const at::Tensor& whole, const Runs& runs, const at::Tensor& part, int64_t offset);

/// Writes runs of `whole`, multiplied, to `part` from element `offset` on, with the bits that at::mul gives when
/// `whole` is first cast to the wider of the two dtypes. The memory of `whole` is without gaps, and the runs are of
/// that memory. Returns false for a dtype that it does not know.
SHARDWISE_API bool scale_runs(
    const at::Tensor& whole, const Runs& runs, double scale, const at::Tensor& part, int64_t offset);

/// Writes 0 and 1 at element `offset` and those after it. Returns false for a dtype that it does not know.
SHARDWISE_API bool put_flags(const std::vector<bool>& flags, const at::Tensor& vector, int64_t offset);

/// A view that is made without the dispatcher, for memory that autograd does not know.
SHARDWISE_API at::Tensor view_of(
    const at::Tensor& buffer, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

} // namespace shardwise::group
