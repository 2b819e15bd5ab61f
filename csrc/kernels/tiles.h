#pragma once

#include "kernels/moves.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

#ifdef __CUDACC__
#define SHARDWISE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SHARDWISE_HOST_DEVICE inline
#endif

// How a device divides moves among blocks of threads, and what one thread does. No CUDA in it, so that a CPU can try
// it.
//
// A move is cut into tiles of kTile words. A block does one tile: each of its threads first reads kWords words, then
// writes them. A word is what one instruction moves: up to 16 bytes.

namespace shardwise::kernels {

constexpr int kThreads = 256;
constexpr int kWords = 4;
constexpr int64_t kTile = int64_t{kThreads} * kWords;

/// A move whose lengths and strides are counted in words, and where its tiles begin among those of a launch.
struct Job {
  Move move;
  int64_t first_tile;
  /// Of long runs each has tiles of its own; of short ones a tile has several, and this is 0.
  int64_t tiles_of_run;
};

inline Job job_of(const Move& move, int64_t first_tile) {
  const bool is_long = move.count == 1 || move.length >= 4 * kTile;
  return {move, first_tile, is_long ? (move.length + kTile - 1) / kTile : 0};
}
inline int64_t tiles_of(const Job& job) {
  const auto& move = job.move;
  return job.tiles_of_run > 0 ? move.count * job.tiles_of_run : (move.count * move.length + kTile - 1) / kTile;
}

/// Which word of a move is read, and which written.
struct Place {
  int64_t from;
  int64_t to;
};
SHARDWISE_HOST_DEVICE Place place_in(const Move& move, int64_t run, int64_t rest) {
  return {run * move.from_stride + rest, run * move.to_stride + rest};
}

/// `is_small`: the words of the move have numbers of 32 bits, which a device divides much faster.
SHARDWISE_HOST_DEVICE Place place_of(const Move& move, int64_t word, bool is_small) {
  const auto run = is_small ? static_cast<int64_t>(static_cast<uint32_t>(word) / static_cast<uint32_t>(move.length))
                            : word / move.length;
  return place_in(move, run, word - run * move.length);
}

/// What a thread does of a tile of a job. `act` reads a word and writes it.
template <typename Act>
SHARDWISE_HOST_DEVICE void do_tile(const Job& job, int64_t tile, int thread, const Act& act) {
  const Move& move = job.move;
  const bool is_long = job.tiles_of_run > 0;
  const int64_t run = is_long ? tile / job.tiles_of_run : 0;
  const int64_t begin = (is_long ? tile - run * job.tiles_of_run : tile) * kTile;
  const int64_t words = is_long ? move.length : move.count * move.length;
  const bool is_small = words <= UINT32_MAX;
  typename Act::Word read[kWords];
  Place places[kWords];
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 0; i < kWords; ++i) {
    const int64_t word = begin + int64_t{i} * kThreads + thread;
    if (word >= words) continue;
    places[i] = is_long ? place_in(move, run, word) : place_of(move, word, is_small);
    read[i] = act.read(move.from, places[i].from);
  }
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int i = 0; i < kWords; ++i) {
    if (begin + int64_t{i} * kThreads + thread < words) act.write(move.to, places[i].to, read[i]);
  }
}

template <typename Bits>
struct Copying {
  using Word = Bits;
  SHARDWISE_HOST_DEVICE Word read(const void* from, int64_t i) const {
    return static_cast<const Bits*>(from)[i];
  }
  SHARDWISE_HOST_DEVICE void write(void* to, int64_t i, const Word& word) const {
    static_cast<Bits*>(to)[i] = word;
  }
};

/// The type to compute in: float for half precision.
template <typename Number>
using Wide = std::conditional_t<std::is_same_v<Number, double>, double, float>;
template <typename From, typename To>
using Both = std::common_type_t<Wide<From>, Wide<To>>;

template <typename From, typename To>
SHARDWISE_HOST_DEVICE To scaled(From number, Both<From, To> factor) {
  return static_cast<To>(static_cast<Both<From, To>>(number) * factor);
}

template <typename Number, int kCount>
struct alignas(sizeof(Number) * kCount) Numbers {
  Number all[kCount];
};

/// How many numbers a word has that is read and written at once.
template <typename From, typename To>
constexpr int kNumbersOfWord = 16 / static_cast<int>(sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));

/// Casts and multiplies words of kCount numbers.
template <typename From, typename To, int kCount>
struct Scaling {
  using Word = Numbers<From, kCount>;
  Both<From, To> factor;
  SHARDWISE_HOST_DEVICE Word read(const void* from, int64_t i) const {
    return static_cast<const Word*>(from)[i];
  }
  SHARDWISE_HOST_DEVICE void write(void* to, int64_t i, const Word& word) const {
    Numbers<To, kCount> numbers;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int n = 0; n < kCount; ++n) numbers.all[n] = scaled<From, To>(word.all[n], factor);
    static_cast<Numbers<To, kCount>*>(to)[i] = numbers;
  }
};

/// Whether a move of elements can be done in words of `count` of them: of `from` and `to` bytes each.
inline bool is_in_words(const Move& move, int64_t count, int64_t from, int64_t to) {
  const auto aligned = [&](const void* address, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes * count) == 0;
  };
  return aligned(move.from, from) && aligned(move.to, to) && move.length % count == 0 &&
         (move.count == 1 || (move.from_stride % count == 0 && move.to_stride % count == 0));
}
/// The same move in such words.
inline Move in_words(Move move, int64_t count) {
  for (auto* elements : {&move.length, &move.from_stride, &move.to_stride}) *elements /= count;
  return move;
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

} // namespace shardwise::kernels
