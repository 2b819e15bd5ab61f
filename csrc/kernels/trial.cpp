#include "kernels/trial.h"

#include <c10/util/Exception.h>

namespace shardwise::kernels {

bool Trial::succeeds_on(at::Device device) {
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

} // namespace shardwise::kernels
