#include "cuda/gate.h"

#include <c10/util/Exception.h>

#ifdef SHARDWISE_WITH_KERNELS
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <vector>
#endif

namespace shardwise::cuda {

#ifdef SHARDWISE_WITH_KERNELS

namespace {

using Wait = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned int);

/// Of the driver, which has no header that fits all versions, and no library where there is no GPU.
Wait wait_of_driver() {
  static const auto found = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
    return driver == nullptr ? nullptr : reinterpret_cast<Wait>(dlsym(driver, "cuStreamWaitValue32_v2"));
  }();
  TORCH_CHECK(
      found != nullptr,
      "shardwise: the CUDA driver is too old to let a stream wait for the host, as the direct transport needs it. "
      "Install a driver for CUDA 12 or newer, or use NCCL.");
  return found;
}

/// A number in memory that the host writes and every device reads.
struct Flag {
  uint32_t* host;
  CUdeviceptr device;
};

/// They live for ever: a stream may still look at one whose gate is gone.
class Flags {
 public:
  static Flags& all() {
    static auto* const flags = new Flags;
    return *flags;
  }
  Flag take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) add();
    const auto flag = free_.back();
    free_.pop_back();
    return flag;
  }
  void give(const Flag& flag) {
    const std::lock_guard lock(mutex_);
    free_.push_back(flag);
  }

 private:
  void add() {
    constexpr size_t kBytes = 4096, kLine = 64;
    void* host = nullptr;
    void* device = nullptr;
    auto error = cudaHostAlloc(&host, kBytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (error == cudaSuccess) error = cudaHostGetDevicePointer(&device, host, 0);
    TORCH_CHECK(error == cudaSuccess, "shardwise: CUDA gave no pinned memory: ", cudaGetErrorString(error));
    for (size_t at = 0; at < kBytes; at += kLine) {
      auto* number = reinterpret_cast<uint32_t*>(static_cast<char*>(host) + at);
      *number = 0;
      free_.push_back({number, reinterpret_cast<CUdeviceptr>(device) + at});
    }
  }

  std::mutex mutex_;
  std::vector<Flag> free_;
};

/// A stream waits until a number in the host's memory is large enough.
class CudaGate final : public base::Gate {
 public:
  CudaGate() : wait_(wait_of_driver()), flag_(Flags::all().take()), begin_(*flag_.host) {}
  ~CudaGate() override {
    Flags::all().give(flag_);
  }

  void hold(const c10::Stream& stream, uint32_t number) override {
    const c10::DeviceGuard guard(stream.device());
    const c10::impl::VirtualGuardImpl device(stream.device_type());
    auto* handle = static_cast<CUstream>(device.getStreamNativeHandle(stream));
    const auto error = wait_(handle, flag_.device, begin_ + number, CU_STREAM_WAIT_VALUE_GEQ);
    TORCH_CHECK(
        error == CUDA_SUCCESS, "shardwise: CUDA let no stream wait for the host: error ", static_cast<int>(error));
  }
  // The driver compares the difference of the two, so the number may overflow.
  void open(uint32_t number) noexcept override {
    std::atomic_ref(*flag_.host).store(begin_ + number, std::memory_order_release);
  }

 private:
  const Wait wait_;
  const Flag flag_;
  const uint32_t begin_;
};

} // namespace

bool has_gates() {
  return true;
}

std::unique_ptr<base::Gate> make_gate(c10::Device device) {
  const c10::DeviceGuard guard(device);
  return std::make_unique<CudaGate>();
}

#else

bool has_gates() {
  return false;
}

std::unique_ptr<base::Gate> make_gate(c10::Device device) {
  TORCH_INTERNAL_ASSERT(false, "no gates for ", device);
}

#endif

} // namespace shardwise::cuda
