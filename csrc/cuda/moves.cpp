#include "cuda/moves.h"

#include "cuda/tiles.h"

#include <c10/util/Exception.h>

#include <cstring>

#ifdef SHARDWISE_WITH_KERNELS
#include "cuda/kernels.h"
#include "cuda/trial.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#endif

namespace shardwise::cuda {
namespace {

#ifdef SHARDWISE_WITH_KERNELS

constexpr std::array<int64_t, 5> kBytesOfWords{16, 8, 4, 2, 1};

// Does not use libc10_cuda, which not every program that links shardwise finds.
cudaStream_t current_stream(at::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return static_cast<cudaStream_t>(guard.getStreamNativeHandle(guard.getStream(device)));
}

void check(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "shardwise: a CUDA kernel could not be launched: ", cudaGetErrorString(error));
}

// Most pieces can be moved 16 bytes at a time.
void copy_on_cuda(at::Device device, int64_t itemsize, const std::vector<Move>& moves) {
  const c10::DeviceGuard guard(device);
  const auto stream = current_stream(device);
  std::array<std::vector<Move>, kBytesOfWords.size()> by_word;
  for (auto move : moves) {
    if (move.count * move.length == 0) continue;
    for (auto* elements : {&move.length, &move.from_stride, &move.to_stride}) *elements *= itemsize;
    size_t i = 0;
    while (!is_in_words(move, kBytesOfWords[i], 1, 1)) ++i;
    by_word[i].push_back(in_words(move, kBytesOfWords[i]));
  }
  for (size_t i = 0; i < kBytesOfWords.size(); ++i) check(launch_copy(stream, kBytesOfWords[i], by_word[i]));
}

bool run_on_cuda(at::Device device) {
  static Trial trial([](at::Device tried) -> std::string {
    const c10::DeviceGuard guard(tried);
    const auto error = try_kernels();
    return error == cudaSuccess ? "" : cudaGetErrorString(error);
  });
  return trial.succeeds_on(device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice());
}

#endif

} // namespace

bool has_kernels(at::Device device) {
#ifdef SHARDWISE_WITH_KERNELS
  if (device.is_cuda()) return run_on_cuda(device);
#endif
  return device.is_cpu();
}

void copy(at::Device device, int64_t itemsize, const std::vector<Move>& moves) {
#ifdef SHARDWISE_WITH_KERNELS
  if (device.is_cuda()) return copy_on_cuda(device, itemsize, moves);
#endif
  TORCH_INTERNAL_ASSERT(device.is_cpu());
  for (const auto& move : moves) {
    const auto* from = static_cast<const char*>(move.from);
    auto* to = static_cast<char*>(move.to);
    for (int64_t i = 0; i < move.count; ++i) {
      std::memcpy(
          to + i * move.to_stride * itemsize, from + i * move.from_stride * itemsize,
          static_cast<size_t>(move.length * itemsize));
    }
  }
}

bool can_scale(at::ScalarType dtype) {
  return with_number(dtype, [](auto) { return true; });
}

void scale(at::Device device, at::ScalarType from, at::ScalarType to, double factor, const std::vector<Move>& moves) {
  TORCH_INTERNAL_ASSERT(can_scale(from) && can_scale(to));
#ifdef SHARDWISE_WITH_KERNELS
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    check(launch_scale(current_stream(device), from, to, factor, moves));
    return;
  }
#endif
  TORCH_INTERNAL_ASSERT(device.is_cpu());
  with_number(from, [&](auto a) {
    return with_number(to, [&](auto b) {
      using From = decltype(a);
      using To = decltype(b);
      const auto by = static_cast<Both<From, To>>(factor);
      for (const auto& move : moves) {
        for (int64_t run = 0; run < move.count; ++run) {
          const auto* source = static_cast<const From*>(move.from) + run * move.from_stride;
          auto* target = static_cast<To*>(move.to) + run * move.to_stride;
          for (int64_t i = 0; i < move.length; ++i) target[i] = scaled<From, To>(source[i], by);
        }
      }
      return true;
    });
  });
}

} // namespace shardwise::cuda
