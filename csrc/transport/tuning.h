#pragma once

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <cstddef>

namespace shardwise::transport {

// Which way a collective goes: measured with processes on one host over loopback, beside Gloo's own collectives
// (benchmarks/collectives.py). All ranks decide alike: the rules look only at what ranks compare first.
//
// Times are the fastest of ten to forty rounds on two cores that others used too; medians there differ by a factor of
// two from run to run. Gloo's all-gather took 1.1 to 2.4 times as long as sends into place, its reduce-scatter 0.9 to 9
// times as long as the exchange of parts with sums here, at two, four and eight ranks: these two are never left to it.

/// Memory is dealt out in whole lines of a cache.
constexpr size_t kCacheLine = 64;
constexpr size_t whole_lines(size_t bytes) {
  return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
}

/// What a rank has for one peer travels with its announcement, if it is no more than this: one message instead of two.
constexpr size_t kInline = 8192;

/// Sums go on while the next piece comes in: a quarter of what a rank sums, within these bounds. Smaller pieces cost
/// more in wake-ups than they hide (128 kB: a third more time at 16 MB), larger ones take more memory.
constexpr size_t kLeastPiece = 262144;
constexpr size_t kLargestPiece = 1048576;
constexpr size_t piece_bytes(size_t bytes) {
  return std::clamp(bytes / 4 / kCacheLine * kCacheLine, kLeastPiece, kLargestPiece);
}

/// Pieces of each peer that may be here before they are summed.
constexpr size_t kPieces = 3;

/// All-reduces of two ranks up to here go as one round of messages, in which each has all of the other's, and not as
/// two of halves: as many bytes.
constexpr size_t kWholeAllReduce = 131072;
constexpr bool is_sooner_whole(size_t bytes, int world) {
  return world == 2 && bytes <= kWholeAllReduce;
}

/// All-reduces from here on go round a ring where hosts have several ranks each, and there is more than one: every link
/// between hosts then carries twice the tensor at most, instead of as many times as a host has ranks. What is added up
/// in another dtype than it is sent in does not.
constexpr size_t kLeastRound = 1048576;
inline bool goes_round(size_t bytes, int world, int hosts, at::ScalarType dtype) {
  return hosts > 1 && hosts < world && bytes >= kLeastRound && dtype != at::kHalf && dtype != at::kBFloat16;
}

/// All-reduces of two ranks are as fast over Gloo or faster from here on (ours take 1.0 to 1.7 times as long), and have
/// the same bits: one addition, one rounding. (A mean of 16 bits has not: Gloo rounds before it divides.) With more
/// ranks the order of Gloo's additions depends on the place in the tensor, and it rounds after each.
constexpr size_t kGlooAllReduce = 131072;
inline bool is_as_good_over_gloo(size_t bytes, int world, at::ScalarType dtype, c10d::ReduceOp::RedOpType op) {
  const bool wide = dtype == at::kFloat || dtype == at::kDouble;
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  return world == 2 && bytes >= kGlooAllReduce && (wide || (half && op == c10d::ReduceOp::SUM));
}

} // namespace shardwise::transport
