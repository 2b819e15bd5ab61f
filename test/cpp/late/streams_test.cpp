// Order on the late device: what the checker finds, in small programs, whatever the timing was.
#include "late_test.h"

#include "late_device/pinned.h"

namespace shardwise::test {
namespace {

at::Tensor numbers(int index = 0) {
  return at::arange(1000, at::TensorOptions(late_device(index)).dtype(at::kFloat));
}

/// Computed on that stream.
at::Tensor one_more(const at::Tensor& x, const c10::Stream& stream) {
  const c10::StreamGuard guard(stream);
  return x + 1;
}

c10::Stream here(int index = 0) {
  return late::current_stream(index);
}

} // namespace

/// What a test planted may be found once more when its tensors go.
class LateStreams : public testing::Test {
  void TearDown() override {
    for (int index = 0; index < late::kDevices; ++index) late::Device::of(index).synchronize_all();
    late::take_faults();
  }
};
using LateMemory = LateStreams;

TEST_F(LateStreams, AReadThatNothingOrdersIsFound) {
  const auto other = new_stream();
  const auto x = numbers();
  const c10::StreamGuard guard(other);
  const auto y = x + 1;
  expect_fault(
      {"'aten::add' reads on stream", "block", "of device 0", "'aten::arange' writes", "must wait for an event"});
}

TEST_F(LateStreams, AWriteThatOvertakesAReadIsFound) {
  const auto other = new_stream();
  auto x = numbers();
  wait_for(other, here());
  const auto y = one_more(x, other);
  x.fill_(0);
  expect_fault({"'aten::fill_' writes on stream", "'aten::add' reads on stream"});
}

TEST_F(LateStreams, AnEventCoversWhatCameBeforeItAlone) {
  const auto other = new_stream();
  auto x = numbers();
  c10::Event event(at::kPrivateUse1);
  event.record(here());
  x.fill_(1);
  event.block(other);
  const c10::StreamGuard guard(other);
  const auto y = x + 1;
  expect_fault({"'aten::add' reads", "'aten::fill_' writes"});
}

TEST_F(LateStreams, WhatIsCapturedMayNotWait) {
  auto x = numbers(3);
  auto y = x + 1;
  y.reset();
  const late::Capturing capturing(3);
  y = x + 1;
  EXPECT_THROW(x.sum().item<float>(), c10::Error);
  EXPECT_THROW(at::empty({1 << 20}, x.options()), c10::Error);
}

TEST_F(LateStreams, AnEventOfAGraphIsNotForTheHost) {
  c10::Event event(at::kPrivateUse1);
  {
    const late::Capturing capturing(0);
    event.record(here());
  }
  event.query();
  expect_fault({"recorded while a graph was captured"});
}

TEST_F(LateStreams, AGraphThatWaitsForWhatIsOutsideItIsFound) {
  c10::Event event(at::kPrivateUse1);
  event.record(here());
  {
    const late::Capturing capturing(0);
    event.block(new_stream());
  }
  expect_fault({"was told to wait for an event of capture 0"});
}

TEST_F(LateStreams, AHostThatWaitsOnAnotherDeviceIsFound) {
  c10::Event event(at::kPrivateUse1);
  event.record(here(3));
  event.synchronize();
  expect_fault({"event of device 3 while device 0 was the current one"});
}

TEST_F(LateMemory, GivenBackWhileAnotherStreamReadsItIsFound) {
  const auto other = new_stream();
  auto x = numbers();
  wait_for(other, here());
  const auto y = one_more(x, other);
  x.reset();
  expect_fault({"'memory given back' writes", "'aten::add' reads"});
}

TEST_F(LateMemory, RecordStreamDoesNothingForMemoryOfAnotherOwner) {
  // As on CUDA: a storage that lends another's memory is not known to the allocator.
  const auto other = new_stream();
  auto owner = numbers();
  auto x = at::for_blob(owner.mutable_data_ptr(), {1000})
               .options(owner.options())
               .deleter([kept = owner](void*) {})
               .target_device(late_device())
               .make_tensor();
  owner.reset();
  wait_for(other, here());
  const auto y = one_more(x, other);
  x.record_stream(other);
  x.reset();
  expect_fault({"'memory given back' writes", "'aten::add' reads"});
}

// The host may not touch what a copy still uses. It is told by a signal, which ends the process.
TEST(LateCopiesDeathTest, TheHostThatTouchesTooEarlyIsStopped) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto pinned = at::ones({100}).pin_memory(late_device().type());
  EXPECT_DEATH(
      {
        const auto there = pinned.to(late_device(), true);
        pinned.data_ptr<float>()[3] = 7;
      },
      "pinned memory that 'copy from the host' of device 0 still reads");
  EXPECT_DEATH(
      {
        const auto back = numbers().to(at::kCPU, true);
        std::printf("%f", back[3].item<float>());
      },
      "pinned memory that 'copy to the host' of device 0 still writes");
  EXPECT_DEATH(std::printf("%f", *numbers().data_ptr<float>()), "the host touched memory of a device");
}

} // namespace shardwise::test
