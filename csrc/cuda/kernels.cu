#include "cuda/kernels.h"
#include "kernels/tiles.h"

#include <algorithm>

namespace shardwise::cuda {

using namespace kernels;

namespace {

/// As many as fit into a kernel's arguments: a captured graph then needs no other memory. These had 4 KiB before CUDA
/// 12.1, and have 32 since.
constexpr size_t kFewJobs = 60;
#if CUDART_VERSION >= 12010
constexpr size_t kManyJobs = 500;
#else
constexpr size_t kManyJobs = kFewJobs;
#endif

template <size_t kMost>
struct Batch {
  Job jobs[kMost];
  int count;
};
static_assert(sizeof(Batch<kFewJobs>) <= 4000 && sizeof(Batch<kManyJobs>) <= 32700);

// The batch stays where the arguments are, instead of being copied for each thread, where the architecture knows that.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700
#define SHARDWISE_GRID_CONSTANT __grid_constant__
#else
#define SHARDWISE_GRID_CONSTANT
#endif

template <size_t kMost, typename Act>
__global__ void __launch_bounds__(kThreads) move_kernel(const SHARDWISE_GRID_CONSTANT Batch<kMost> batch, Act act) {
  const int64_t tile = blockIdx.x;
  int low = 0;
  for (int high = batch.count; high - low > 1;) {
    const int middle = (low + high) / 2;
    (batch.jobs[middle].first_tile <= tile ? low : high) = middle;
  }
  const Job& job = batch.jobs[low];
  do_tile(job, tile - job.first_tile, static_cast<int>(threadIdx.x), act);
}

bool takes_many() {
  static const bool does = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess && version >= 12010;
  }();
  return does;
}

template <size_t kMost, typename Act>
cudaError_t launch_batches(cudaStream_t stream, const std::vector<Move>& moves, Act act) {
  for (size_t first = 0; first < moves.size(); first += kMost) {
    const auto count = std::min(kMost, moves.size() - first);
    Batch<kMost> batch;
    batch.count = static_cast<int>(count);
    int64_t tiles = 0;
    for (size_t i = 0; i < count; ++i) {
      batch.jobs[i] = job_of(moves[first + i], tiles);
      tiles += tiles_of(batch.jobs[i]);
    }
    move_kernel<kMost><<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(batch, act);
    if (const auto error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename Act>
cudaError_t launch(cudaStream_t stream, const std::vector<Move>& moves, Act act) {
  return moves.size() > kFewJobs && takes_many() ? launch_batches<kManyJobs>(stream, moves, act)
                                                 : launch_batches<kFewJobs>(stream, moves, act);
}

template <typename From, typename To>
cudaError_t launch_scale(cudaStream_t stream, double factor, const std::vector<Move>& moves) {
  constexpr int kCount = kNumbersOfWord<From, To>;
  const auto by = static_cast<Both<From, To>>(factor);
  std::vector<Move> words;
  std::vector<Move> numbers;
  for (const auto& move : moves) {
    if (move.count * move.length == 0) continue;
    if (is_in_words(move, kCount, sizeof(From), sizeof(To))) {
      words.push_back(in_words(move, kCount));
    } else {
      numbers.push_back(move);
    }
  }
  const auto error = launch(stream, words, Scaling<From, To, kCount>{by});
  return error == cudaSuccess ? launch(stream, numbers, Scaling<From, To, 1>{by}) : error;
}

} // namespace

cudaError_t launch_copy(cudaStream_t stream, int64_t word, const std::vector<Move>& moves) {
  switch (word) {
    case 1:
      return launch(stream, moves, Copying<uint8_t>{});
    case 2:
      return launch(stream, moves, Copying<uint16_t>{});
    case 4:
      return launch(stream, moves, Copying<uint32_t>{});
    case 8:
      return launch(stream, moves, Copying<uint2>{});
    default:
      return launch(stream, moves, Copying<uint4>{});
  }
}

// Loads them, and launches nothing: it may be asked while a graph is captured.
cudaError_t try_kernels() {
  cudaFuncAttributes attributes{};
  const auto error = cudaFuncGetAttributes(&attributes, move_kernel<kFewJobs, Copying<uint4>>);
  // Else the next call that asks for the last error would take it for its own.
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

cudaError_t launch_scale(
    cudaStream_t stream, at::ScalarType from, at::ScalarType to, double factor, const std::vector<Move>& moves) {
  auto error = cudaErrorInvalidValue;
  with_number(from, [&](auto a) {
    return with_number(to, [&](auto b) {
      error = launch_scale<decltype(a), decltype(b)>(stream, factor, moves);
      return true;
    });
  });
  return error;
}

} // namespace shardwise::cuda
