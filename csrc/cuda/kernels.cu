#include "cuda/kernels.h"
#include "cuda/move_element.h"

#include <algorithm>

namespace shardwise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kElementsOfAThread = 4;
constexpr int64_t kMostBlocks = 1024;
/// As many as fit into a kernel's arguments: a captured graph then needs no other memory.
constexpr size_t kMovesOfALaunch = 64;

struct Batch {
  Move moves[kMovesOfALaunch];
};
static_assert(sizeof(Batch) <= 4000, "the arguments of a kernel have 4 KiB");

// The batch stays where the arguments are, instead of being copied for each thread, where the architecture knows that.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 700
#define SHARDWISE_GRID_CONSTANT __grid_constant__
#else
#define SHARDWISE_GRID_CONSTANT
#endif

template <typename Element>
__global__ void move_kernel(const SHARDWISE_GRID_CONSTANT Batch batch, Element element) {
  const Move& move = batch.moves[blockIdx.y];
  const int64_t numel = move.count * move.length;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < numel; i += step) element(move, i);
}

template <typename Bits>
struct Copying {
  __device__ void operator()(const Move& move, int64_t i) const {
    copy_element<Bits>(move, i);
  }
};

template <typename From, typename To>
struct Scaling {
  Both<From, To> factor;
  __device__ void operator()(const Move& move, int64_t i) const {
    scale_element<From, To>(move, i, factor);
  }
};

template <typename Element>
cudaError_t launch(cudaStream_t stream, const std::vector<Move>& moves, Element element) {
  for (size_t first = 0; first < moves.size(); first += kMovesOfALaunch) {
    const size_t count = std::min(kMovesOfALaunch, moves.size() - first);
    Batch batch{};
    int64_t longest = 1;
    for (size_t i = 0; i < count; ++i) {
      batch.moves[i] = moves[first + i];
      longest = std::max(longest, batch.moves[i].count * batch.moves[i].length);
    }
    constexpr int64_t block = kThreads * kElementsOfAThread;
    const auto blocks = static_cast<unsigned>(std::min(kMostBlocks, (longest + block - 1) / block));
    move_kernel<<<dim3(blocks, static_cast<unsigned>(count)), kThreads, 0, stream>>>(batch, element);
    if (const auto error = cudaGetLastError(); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

} // namespace

cudaError_t launch_copy(cudaStream_t stream, int64_t unit, const std::vector<Move>& moves) {
  switch (unit) {
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
  const auto error = cudaFuncGetAttributes(&attributes, move_kernel<Copying<uint4>>);
  // Else whoever asks next for the last error would take it for their own.
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

cudaError_t launch_scale(
    cudaStream_t stream, at::ScalarType from, at::ScalarType to, double factor, const std::vector<Move>& moves) {
  auto error = cudaErrorInvalidValue;
  with_number(from, [&](auto a) {
    return with_number(to, [&](auto b) {
      using From = decltype(a);
      using To = decltype(b);
      error = launch(stream, moves, Scaling<From, To>{static_cast<Both<From, To>>(factor)});
      return true;
    });
  });
  return error;
}

} // namespace shardwise::cuda
