#include "kernels/cuda_library.h"

#include <c10/util/Exception.h>

#include <dlfcn.h>
#include <unistd.h>

namespace shardwise::kernels {
namespace {

/// Beside the library that this function belongs to.
std::string path_of_library() {
  Dl_info own{};
  dladdr(reinterpret_cast<const void*>(&path_of_library), &own);
  const std::string path = own.dli_fname;
  return path.substr(0, path.rfind('/') + 1) + "libshardwise_cuda.so";
}

const CudaLibrary* open_library() {
  // A program that has CUDA devices has loaded it.
  if (dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD) == nullptr) return nullptr;
  const auto path = path_of_library();
  if (access(path.c_str(), R_OK) != 0) return nullptr;
  void* opened = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    TORCH_WARN(
        "shardwise: its library for CUDA cannot be loaded, so there is no NCCL and there are no CUDA kernels: ",
        dlerror()); // NOLINT(concurrency-mt-unsafe)
    return nullptr;
  }
  return reinterpret_cast<const CudaLibrary* (*)()>(dlsym(opened, "shardwise_cuda_library"))();
}

/// All that a stream can tell: another capture is no other number.
template <typename Stream>
uint64_t is_captured(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) return stream.is_capturing() ? 1 : 0;
  return 0;
}

CaptureOf asked = nullptr;

} // namespace

const CudaLibrary* cuda_library() {
  static const CudaLibrary* const library = open_library();
  return library;
}

uint64_t capture_of(const c10::Stream& stream) {
  if (asked != nullptr) return asked(stream);
  const auto* cuda = stream.device_type() == c10::kCUDA ? cuda_library() : nullptr;
  const auto capture = cuda != nullptr ? cuda->capture_of(stream) : std::nullopt;
  return capture ? *capture : is_captured(stream);
}

void ask_for_captures(CaptureOf capture_of) {
  asked = capture_of;
}

} // namespace shardwise::kernels
