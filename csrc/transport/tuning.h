#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <cstddef>

namespace shardwise::transport {

// Thresholds that choose how a collective is carried out. They were measured with processes on one host over loopback,
// beside Gloo's own collectives (benchmarks/collectives.py). All ranks choose alike: the rules only look at what ranks
// have compared.
//
// Times are the fastest of ten to forty rounds on two shared cores, where medians differ by a factor of two from run to
// run. At two, four and eight ranks Gloo's all-gather took 1.1 to 2.4 times as long as our direct sends, and its
// reduce-scatter 0.9 to 9 times as long as ours: these two are never left to Gloo.

/// Memory is divided in whole cache lines.
constexpr size_t kCacheLine = 64;
constexpr size_t whole_lines(size_t bytes) {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

/// Up to this size, a rank's data for a peer travels with its announcement: one message instead of two.
constexpr size_t kInline = 8192;

/// One piece is summed while the next one arrives. A piece is a quarter of what a rank sums, within these bounds.
/// Smaller pieces cost more in wake-ups than they hide (128 kB: a third more time at 16 MB); larger ones take more
/// memory.
constexpr size_t kLeastPiece = 262144;
constexpr size_t kLargestPiece = 1048576;
constexpr size_t piece_bytes(size_t bytes) {
  return std::clamp(bytes / 4 / kCacheLine * kCacheLine, kLeastPiece, kLargestPiece);
}

/// How many pieces per peer may arrive before they are summed.
constexpr size_t kPieces = 3;

/// Up to this size, two ranks all-reduce in one round of messages, each sending everything, instead of two rounds of
/// halves: the bytes are the same.
constexpr size_t kWholeAllReduce = 131072;
constexpr bool all_reduces_in_one_round(size_t bytes, int world) {
  return world == 2 && bytes <= kWholeAllReduce;
}

/// From this size on, all-reduces go round a ring if there are several hosts with several ranks each. Every link
/// between hosts then carries at most twice the tensor, instead of as many times as a host has ranks. Not for dtypes
/// that are summed in another dtype than they are sent in.
constexpr size_t kLeastRing = 1048576;
inline bool uses_ring(size_t bytes, int world, int hosts, at::ScalarType dtype) {
  return hosts > 1 && hosts < world && bytes >= kLeastRing && dtype != at::kHalf && dtype != at::kBFloat16;
}

/// From this size on, an all-reduce of two ranks is at least as fast over Gloo (ours takes 1.0 to 1.7 times as long)
/// and gives the same bits: one addition, one rounding. Means of 16-bit types do not: Gloo rounds before it divides.
/// With more ranks Gloo's order of additions depends on the position in the tensor, and it rounds after each.
constexpr size_t kGlooAllReduce = 131072;
inline bool gloo_is_as_fast(size_t bytes, int world, at::ScalarType dtype, c10d::ReduceOp::RedOpType op) {
  const bool wide = dtype == at::kFloat || dtype == at::kDouble;
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  return world == 2 && bytes >= kGlooAllReduce && (wide || (half && op == c10d::ReduceOp::SUM));
}

} // namespace shardwise::transport
