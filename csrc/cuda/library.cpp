#include "cuda/nccl.h"
#include "kernels/cuda_library.h"

#include <shardwise/detail/export.h>

#ifdef SHARDWISE_WITH_KERNELS
#include "cuda/kernels.h"
#include "kernels/tiles.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

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

#endif

class Library final : public kernels::CudaLibrary {
 public:
  c10::intrusive_ptr<c10d::Backend> make_nccl(const comm::GroupSpec& spec) const override {
    return cuda::make_nccl(spec);
  }

#ifdef SHARDWISE_WITH_KERNELS
  // The default stream cannot be asked while another one is captured, and is then not captured itself.
  std::optional<uint64_t> capture_of(const c10::Stream& stream) const override {
    auto status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0; // NOLINT(google-runtime-int): as CUDA has it
    if (cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream.native_handle()), &status, &capture) == cudaSuccess) {
      // Whatever CUDA counts from: 0 is none.
      return status == cudaStreamCaptureStatusNone ? 0 : capture + 1;
    }
    cudaGetLastError(); // Otherwise the next caller that asks would take it for its own.
    return 0;
  }

  std::string why_no_kernels(at::Device device) const override {
    const c10::DeviceGuard guard(device);
    const auto error = try_kernels();
    return error == cudaSuccess ? "" : cudaGetErrorString(error);
  }

  // Most pieces can be moved 16 bytes at a time.
  void copy(at::Device device, int64_t itemsize, const std::vector<kernels::Move>& moves) const override {
    const c10::DeviceGuard guard(device);
    const auto stream = current_stream(device);
    std::array<std::vector<kernels::Move>, kBytesOfWords.size()> by_word;
    for (auto move : moves) {
      if (move.count * move.length == 0) continue;
      for (auto* elements : {&move.length, &move.from_stride, &move.to_stride}) *elements *= itemsize;
      size_t i = 0;
      while (!kernels::is_in_words(move, kBytesOfWords[i], 1, 1)) ++i;
      by_word[i].push_back(kernels::in_words(move, kBytesOfWords[i]));
    }
    for (size_t i = 0; i < kBytesOfWords.size(); ++i) check(launch_copy(stream, kBytesOfWords[i], by_word[i]));
  }

  void scale(
      at::Device device, at::ScalarType from, at::ScalarType to, double factor,
      const std::vector<kernels::Move>& moves) const override {
    const c10::DeviceGuard guard(device);
    check(launch_scale(current_stream(device), from, to, factor, moves));
  }
#else
  std::optional<uint64_t> capture_of(const c10::Stream& /*stream*/) const override {
    return std::nullopt;
  }
  std::string why_no_kernels(at::Device /*device*/) const override {
    return "it was built without nvcc";
  }
  void copy(at::Device, int64_t, const std::vector<kernels::Move>&) const override {}
  void scale(at::Device, at::ScalarType, at::ScalarType, double, const std::vector<kernels::Move>&) const override {}
#endif
};

} // namespace
} // namespace shardwise::cuda

/// What libshardwise calls when it has opened this library.
extern "C" SHARDWISE_API const shardwise::kernels::CudaLibrary* shardwise_cuda_library() {
  static const shardwise::cuda::Library library;
  return &library;
}
