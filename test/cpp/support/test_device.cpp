#include "support/test_device.h"

#include "comm/mesh/device_backend.h"
#include "late_device/device.h"
#include "late_device/faults.h"
#include "late_device/group.h"
#include "late_device/late.h"
#include "stream_group/group.h"
#include "thread_group/streams.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace shardwise::test {
namespace {

/// A test in which the device found a mistake has failed.
class FailForFaults : public testing::EmptyTestEventListener {
  void OnTestEnd(const testing::TestInfo& /*test*/) override {
    for (const auto& fault : late::take_faults()) ADD_FAILURE() << fault;
  }
};

/// A test that cannot run says why.
class SkipAll : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& /*test*/) override {
    GTEST_SKIP() << problem_of_test_device();
  }
};

bool is_shared() {
  return test_device() == "late_shared" || test_device() == "cuda";
}

template <typename Group>
void carry(c10::DeviceType device) {
  // Among c10d's types one that nothing else here has: a process group keeps one back end of each.
  comm::set_device_backend(device, {c10d::ProcessGroup::BackendType::UCC, [](const comm::GroupSpec& spec) {
                                      return c10::make_intrusive<Group>(
                                          spec.store, spec.rank, spec.size, spec.device, spec.timeout);
                                    }});
}

/// The same for a rank in every test: what a thread has made is often still in use when it ends.
const c10::Stream& stream_of_rank(int rank) {
  static std::mutex mutex;
  static auto* const all = new std::map<int, thread_group::BorrowedStream>;
  const std::lock_guard lock(mutex);
  return all->try_emplace(rank, device_of_rank(rank)).first->second.get();
}

} // namespace

const std::string& test_device() {
  static const std::string name = [] {
    const char* text = std::getenv("SHARDWISE_TEST_DEVICE"); // NOLINT(concurrency-mt-unsafe)
    return std::string(text == nullptr ? "cpu" : text);
  }();
  return name;
}

std::string problem_of_test_device() {
  return test_device() == "cuda" && !at::globalContext().hasCUDA() ? "SHARDWISE_TEST_DEVICE is cuda: torch finds no GPU"
                                                                   : "";
}

void set_up_test_device() {
  const auto& name = test_device();
  if (name == "cpu") return;
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  if (!problem_of_test_device().empty()) {
    listeners.Append(new SkipAll);
  } else if (name == "cuda") {
    carry<stream_group::Group>(c10::kCUDA);
    // Tests compare more digits of a convolution than the ten bits that are torch's default there.
    at::globalContext().setAllowTF32CuDNN(false);
  } else {
    TORCH_CHECK(
        name == "late" || name == "late_shared", "SHARDWISE_TEST_DEVICE is '", name,
        "'; it may be cpu, late, late_shared or cuda.");
    late::install();
    is_shared() ? carry<stream_group::Group>(c10::kPrivateUse1) : carry<late::Group>(c10::kPrivateUse1);
    listeners.Append(new FailForFaults);
  }
}

at::Device device_of_rank(int rank) {
  if (test_device() == "cpu") return at::kCPU;
  if (test_device() == "cuda") return {at::kCUDA, 0};
  return {at::kPrivateUse1, static_cast<c10::DeviceIndex>(is_shared() ? 0 : rank % late::kDevices)};
}

OnDeviceOfRank::OnDeviceOfRank(int rank) : autograd_(c10::AutogradState::get_tls_state()) {
  if (test_device() == "cpu") return;
  current_.emplace(device_of_rank(rank));
  if (is_shared()) {
    stream_.emplace(stream_of_rank(rank));
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  }
  usual_.emplace(device_of_rank(rank));
}

OnDeviceOfRank::~OnDeviceOfRank() {
  try {
    // What the rank leaves behind is for threads that know nothing of its stream.
    if (stream_) stream_->current_stream().synchronize();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank's stream: " << error.what();
  }
  c10::AutogradState::set_tls_state(autograd_);
}

} // namespace shardwise::test
