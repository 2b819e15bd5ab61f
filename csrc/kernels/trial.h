#pragma once

#include <shardwise/export.h>

#include <c10/core/Device.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace shardwise::kernels {

/// Finds out whether kernels of ours run on a device: each is tried once. Thread safe.
class SHARDWISE_API Trial {
 public:
  /// `why_not` tries a device that has an index, and returns "" or why they do not run there.
  explicit Trial(std::function<std::string(at::Device)> why_not) : why_not_(std::move(why_not)) {}

  /// Where they do not run, the first call warns that torch's kernels do their work.
  bool succeeds_on(at::Device device);

 private:
  std::function<std::string(at::Device)> why_not_;
  std::mutex mutex_;
  std::map<c10::DeviceIndex, bool> found_;
};

} // namespace shardwise::kernels
