#include "support/test_device.h"

#include "comm/device_backend.h"
#include "late_device/device.h"
#include "late_device/faults.h"
#include "late_device/group.h"
#include "late_device/late.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdlib>

namespace shardwise::test {
namespace {

/// A test in which the device found a mistake has failed.
class FailForFaults : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo& /*test*/) override {
    for (const auto& fault : late::take_faults()) ADD_FAILURE() << fault;
  }
};

} // namespace

const std::string& test_device() {
  static const std::string name = [] {
    const char* text = std::getenv("SHARDWISE_TEST_DEVICE"); // NOLINT(concurrency-mt-unsafe)
    return std::string(text == nullptr ? "cpu" : text);
  }();
  return name;
}

void set_up_test_device() {
  if (test_device() == "cpu") return;
  TORCH_CHECK(test_device() == "late", "SHARDWISE_TEST_DEVICE is '", test_device(), "'; it may be cpu or late.");
  late::install();
  // Among c10d's types one that nothing else here has: a process group keeps one back end of each.
  comm::set_device_backend(c10::kPrivateUse1, {c10d::ProcessGroup::BackendType::UCC, [](const comm::GroupSpec& spec) {
                                                 return c10::make_intrusive<late::Group>(
                                                     spec.store, spec.rank, spec.size, spec.device, spec.timeout);
                                               }});
  testing::UnitTest::GetInstance()->listeners().Append(new FailForFaults);
}

at::Device device_of_rank(int rank) {
  if (test_device() == "cpu") return at::kCPU;
  return {at::kPrivateUse1, static_cast<c10::DeviceIndex>(rank % late::kDevices)};
}

OnDeviceOfRank::OnDeviceOfRank(int rank) {
  if (test_device() == "cpu") return;
  current_.emplace(device_of_rank(rank));
  usual_.emplace(device_of_rank(rank));
}

} // namespace shardwise::test
