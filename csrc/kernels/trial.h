#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace shardwise::kernels {

/// Finds out whether kernels of ours run on a device: each is tried once. Thread safe.
class Trial {
 public:
  /// `why_not` tries a device that has an index, and returns "" or why they do not run there.
  explicit Trial(std::function<std::string(at::Device)> why_not) : why_not_(std::move(why_not)) {}

  /// Where they do not run, the first call warns that torch's kernels do their work.
  bool succeeds_on(at::Device device) {
    const std::lock_guard lock(mutex_);
    const auto known = found_.find(device.index());
    if (known != found_.end()) return known->second;
    const auto reason = why_not_(device);
    if (!reason.empty()) {
      TORCH_WARN(
          "shardwise: its CUDA kernels do not run on ", device, " (", reason,
          "), so torch's kernels move parameters and gradients there one by one, which is slower. Build shardwise with "
          "CMAKE_CUDA_ARCHITECTURES for this device, and with a CUDA toolkit that its driver supports.");
    }
    return found_[device.index()] = reason.empty();
  }

 private:
  std::function<std::string(at::Device)> why_not_;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, bool> found_;
};

} // namespace shardwise::kernels
