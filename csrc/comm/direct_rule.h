#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <cstddef>

namespace shardwise::comm::direct {

// Which way a collective goes: measured with processes on one host over loopback, beside Gloo's own collectives
// (benchmarks/collectives.py). All ranks decide alike: the rules look only at what ranks compare first.
//
// Gloo's all-gather takes 1.1 to 3 times as long as sends into place, its reduce-scatter 1.5 to 5 times as long as the
// exchange of parts with sums here, at every size and world tried, so these two are never left to it.

/// What a rank has for one peer travels with its announcement, if it is no more than this: half to a fifth of the time.
constexpr size_t kInline = 8192;

/// Sums go on while the next piece comes in: a quarter of what a rank sums, within these bounds. Smaller pieces cost
/// more in wake-ups than they hide (128 kB: a third more time at 16 MB), larger ones take more memory.
constexpr size_t kLeastPiece = size_t{1} << 18;
constexpr size_t kLargestPiece = size_t{1} << 20;
constexpr size_t piece_bytes(size_t bytes) {
  constexpr size_t kLine = 64;
  return std::clamp(bytes / 4 / kLine * kLine, kLeastPiece, kLargestPiece);
}

/// Pieces of each peer that may be here before they are summed.
constexpr size_t kPieces = 3;

/// All-reduces of two ranks are as fast over Gloo or faster from here on, and have the same bits: one addition, one
/// rounding. (A mean of 16 bits has not: Gloo rounds before it divides.) With more ranks the order of Gloo's additions
/// depends on the place in the tensor, and it rounds after each.
constexpr size_t kGlooAllReduce = size_t{1} << 17;
inline bool leaves_all_reduce_to_gloo(size_t bytes, int world, at::ScalarType dtype, c10d::ReduceOp::RedOpType op) {
  const bool wide = dtype == at::kFloat || dtype == at::kDouble;
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  return world == 2 && bytes >= kGlooAllReduce && (wide || (half && op == c10d::ReduceOp::SUM));
}

} // namespace shardwise::comm::direct
