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

template <typename Stream>
bool stream_is_capturing(const Stream& stream) {
  if constexpr (requires { stream.is_capturing(); }) return stream.is_capturing();
  const auto* cuda = stream.device_type() == c10::kCUDA ? cuda_library() : nullptr;
  return cuda != nullptr && cuda->is_capturing(stream);
}

} // namespace

const CudaLibrary* cuda_library() {
  static const CudaLibrary* const library = open_library();
  return library;
}

bool is_capturing(const c10::Stream& stream) {
  return stream_is_capturing(stream);
}

} // namespace shardwise::kernels
