#include "cuda/capture.h"

#ifdef SHARDWISE_WITH_KERNELS
#include <cuda_runtime_api.h>
#endif

namespace shardwise::cuda {
namespace {

#ifdef SHARDWISE_WITH_KERNELS

// The default stream cannot be asked while another one is captured, and is then not captured itself.
bool runtime_is_capturing(const c10::Stream& stream) {
  auto status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream.native_handle()), &status) == cudaSuccess) {
    return status != cudaStreamCaptureStatusNone;
  }
  cudaGetLastError(); // Else whoever asks next would take it for their own.
  return false;
}

#endif

template <typename Stream>
bool stream_is_capturing(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) return stream.is_capturing();
#ifdef SHARDWISE_WITH_KERNELS
  if (stream.device_type() == c10::kCUDA) return runtime_is_capturing(stream);
#endif
  return false;
}

} // namespace

bool is_capturing(const c10::Stream& stream) {
  return stream_is_capturing(stream);
}

} // namespace shardwise::cuda
