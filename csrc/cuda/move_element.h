#pragma once

#include "cuda/moves.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

#ifdef __CUDACC__
#define SHARDWISE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SHARDWISE_HOST_DEVICE inline
#endif

// What is done for one element, in the CPU's loop and in the device's kernel: tests of one hold for the other.

namespace shardwise::cuda {

/// The type to compute in: float for half precision.
template <typename Number>
using Wide = std::conditional_t<std::is_same_v<Number, double>, double, float>;
template <typename From, typename To>
using Both = std::common_type_t<Wide<From>, Wide<To>>;

/// Where element i of a move is read and written.
struct Offsets {
  int64_t from;
  int64_t to;
};
SHARDWISE_HOST_DEVICE Offsets offsets_of(const Move& move, int64_t i) {
  if (move.count == 1) return {i, i};
  const int64_t run = i / move.length;
  const int64_t rest = i - run * move.length;
  return {run * move.from_stride + rest, run * move.to_stride + rest};
}

template <typename Bits>
SHARDWISE_HOST_DEVICE void copy_element(const Move& move, int64_t i) {
  const auto at = offsets_of(move, i);
  static_cast<Bits*>(move.to)[at.to] = static_cast<const Bits*>(move.from)[at.from];
}

template <typename From, typename To>
SHARDWISE_HOST_DEVICE void scale_element(const Move& move, int64_t i, Both<From, To> factor) {
  const auto at = offsets_of(move, i);
  const auto value = static_cast<Both<From, To>>(static_cast<const From*>(move.from)[at.from]);
  static_cast<To*>(move.to)[at.to] = static_cast<To>(value * factor);
}

/// Calls act(Number()) if the dtype can be scaled here.
template <typename Act>
bool with_number(at::ScalarType dtype, const Act& act) {
  if (dtype == at::ScalarType::Float) return act(float());
  if (dtype == at::ScalarType::Double) return act(double());
  if (dtype == at::ScalarType::BFloat16) return act(c10::BFloat16());
  if (dtype == at::ScalarType::Half) return act(c10::Half());
  return false;
}

} // namespace shardwise::cuda
