#pragma once

#include "support/default_device.h"

#include <c10/core/AutogradState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <optional>
#include <string>

namespace shardwise::test {

/// What SHARDWISE_TEST_DEVICE says: where ranks that are threads train.
/// - "cpu";
/// - "late": test/late_device, a device for each rank;
/// - "late_shared": one such device for all of them, and the process group of test/stream_group;
/// - "cuda": the same on the GPU. Where there is none, every test is skipped.
const std::string& test_device();
/// Prepares the process for it, before its first test.
void set_up_test_device();
/// Why no test can run on it; empty if they can.
std::string problem_of_test_device();

/// Rank k's device.
at::Device device_of_rank(int rank);
/// For a rank that is a thread: its device is the current one, and the one for all that it makes. If all ranks have the
/// same, it computes on a stream of its own, and its backwards run on its thread.
class OnDeviceOfRank {
 public:
  explicit OnDeviceOfRank(int rank);
  ~OnDeviceOfRank();
  OnDeviceOfRank(const OnDeviceOfRank&) = delete;
  OnDeviceOfRank& operator=(const OnDeviceOfRank&) = delete;

 private:
  const c10::AutogradState autograd_;
  std::optional<c10::DeviceGuard> current_;
  std::optional<c10::StreamGuard> stream_;
  std::optional<DefaultDevice> usual_;
};

} // namespace shardwise::test
