#pragma once

#include "late_device/device.h"
#include "late_device/faults.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

namespace shardwise::test {

inline at::Device late_device(int index = 0) {
  return {at::kPrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

inline c10::Stream new_stream(int index = 0) {
  return late::Device::of(index).new_stream();
}

/// `waits` goes on once all is done that `other` has by now.
inline void wait_for(const c10::Stream& waits, const c10::Stream& other) {
  c10::Event event(at::kPrivateUse1);
  event.record(other);
  event.block(waits);
}

inline int64_t used_on(late::Device& device) {
  device.synchronize_all();
  return static_cast<int64_t>(device.used());
}

/// The most that is used there while `act` runs.
template <typename Act>
int64_t peak_of(late::Device& device, const Act& act) {
  device.synchronize_all();
  device.reset_peak();
  act();
  device.synchronize_all();
  return static_cast<int64_t>(device.peak());
}

/// What the device reported since the last call: exactly one fault that has all these words.
inline void expect_fault(const std::vector<std::string>& words) {
  const auto faults = late::take_faults();
  ASSERT_EQ(faults.size(), 1) << (faults.empty() ? "nothing was reported" : faults[1]);
  for (const auto& word : words) EXPECT_NE(faults[0].find(word), std::string::npos) << faults[0] << "\nlacks: " << word;
}

inline void expect_no_fault() {
  const auto faults = late::take_faults();
  EXPECT_TRUE(faults.empty()) << faults.front();
}

inline void expect_same(
    const at::Tensor& got, const at::Tensor& wanted, const std::string& what, double tolerance = 0) {
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  ASSERT_EQ(got.scalar_type(), wanted.scalar_type()) << what;
  EXPECT_TRUE(at::allclose(got.cpu(), wanted, tolerance, tolerance, /*equal_nan=*/true)) << what << "\n"
                                                                                         << got.cpu() << "\n"
                                                                                         << wanted;
}

} // namespace shardwise::test
