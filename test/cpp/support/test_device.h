#pragma once

#include "support/default_device.h"

#include <c10/core/DeviceGuard.h>

#include <optional>
#include <string>

namespace shardwise::test {

/// What SHARDWISE_TEST_DEVICE says: where ranks that are threads train. "cpu", or "late": test/late_device.
const std::string& test_device();
/// Prepares the process for it, before its first test.
void set_up_test_device();

/// Rank k's own device.
at::Device device_of_rank(int rank);
/// For a rank that is a thread: its device is the current one, and the one for all that it makes.
class OnDeviceOfRank {
 public:
  explicit OnDeviceOfRank(int rank);

 private:
  std::optional<c10::DeviceGuard> current_;
  std::optional<DefaultDevice> usual_;
};

} // namespace shardwise::test
