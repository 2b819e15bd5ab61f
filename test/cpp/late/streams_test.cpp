// Order on the late device: what the checker finds, in small programs, whatever the timing was.
#include "late_test.h"

#include "late_device/pinned.h"

namespace shardwise::test {
namespace {

at::Tensor numbers(int index = 0) {
  return at::arange(1000, at::TensorOptions(late_device(index)).dtype(at::kFloat));
}

void wait_for(const c10::Stream& waits, const c10::Stream& other) {
  c10::Event event(at::kPrivateUse1);
  event.record(other);
  event.block(waits);
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

TEST_F(LateStreams, AnEventOrdersTwoStreams) {
  const auto other = new_stream();
  auto x = numbers();
  wait_for(other, here());
  const auto y = one_more(x, other);
  wait_for(here(), other);
  x.fill_(0);
  expect_same(y, at::arange(1000).to(at::kFloat) + 1, "y");
  expect_no_fault();
}

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

TEST_F(LateStreams, OnlyTheBytesThatMeetMatter) {
  const auto other = new_stream();
  auto x = numbers();
  wait_for(other, here());
  x.narrow(0, 0, 500).fill_(1);
  {
    const c10::StreamGuard guard(other);
    x.narrow(0, 500, 500).fill_(2);
    x.view({100, 10}).narrow(1, 3, 2).narrow(0, 50, 50).fill_(3);
  }
  expect_no_fault();
  x.view({100, 10}).select(1, 4).fill_(3);
  expect_fault({"'aten::fill_' writes", "that 'aten::fill_' writes"});
  wait_for(here(), other);
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

TEST_F(LateStreams, AHostThatWaitedOrdersAll) {
  const auto other = new_stream();
  const auto x = numbers();
  here().synchronize();
  const c10::StreamGuard guard(other);
  const auto y = x + 1;
  expect_no_fault();
}

TEST_F(LateStreams, ValuesAndBlockingCopiesAreCountedAsWaits) {
  const auto before = late::host_waits(3);
  auto x = numbers(3);
  x = x * 2 + 1;
  EXPECT_EQ(late::host_waits(3), before);
  EXPECT_EQ(x[1].item<float>(), 3);
  EXPECT_EQ(late::host_waits(3), before + 1);
  x.copy_(at::zeros({1000}));
  EXPECT_EQ(late::host_waits(3), before + 2);
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

TEST_F(LateMemory, HoldsNanUntilItIsWritten) {
  const auto x = at::empty({77}, at::TensorOptions(late_device()).dtype(at::kFloat));
  EXPECT_TRUE(at::isnan(x).all().item<bool>());
  EXPECT_TRUE(at::isnan(at::empty({77}, x.options().dtype(at::kBFloat16))).all().item<bool>());
}

TEST_F(LateMemory, IsPoisonedWhenItIsGivenBackAndUsedAgainFirst) {
  auto x = numbers(4);
  const auto* place = x.const_data_ptr();
  x.reset();
  x = at::empty({1000}, at::TensorOptions(late_device(4)).dtype(at::kFloat));
  EXPECT_EQ(x.const_data_ptr(), place);
  EXPECT_TRUE(at::isnan(x).all().item<bool>());
  expect_no_fault();
}

TEST_F(LateMemory, GivenBackWhileAnotherStreamReadsItIsFound) {
  const auto other = new_stream();
  auto x = numbers();
  wait_for(other, here());
  const auto y = one_more(x, other);
  x.reset();
  expect_fault({"'memory given back' writes", "'aten::add' reads"});
}

TEST_F(LateMemory, RecordStreamKeepsIt) {
  const auto other = new_stream();
  auto x = numbers();
  wait_for(other, here());
  at::Tensor y;
  {
    const c10::StreamGuard guard(other);
    y = x + 1;
    x.record_stream(other);
  }
  x.reset();
  for (int k = 0; k < 10; ++k) numbers().fill_(k);
  wait_for(here(), other);
  expect_same(y, at::arange(1000).to(at::kFloat) + 1, "y");
  expect_no_fault();
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

TEST_F(LateMemory, ItsUseIsCounted) {
  auto& device = late::Device::of(5);
  device.reset_peak();
  const auto before = device.used();
  {
    const auto x = at::empty({1024}, at::TensorOptions(late_device(5)).dtype(at::kFloat));
    EXPECT_EQ(device.used(), before + 4096);
  }
  EXPECT_EQ(device.used(), before);
  EXPECT_EQ(device.peak(), before + 4096);
}

TEST(LateCopies, GoThereAndBack) {
  const auto x = at::randn({30, 40});
  expect_same(x.to(late_device(1)).to(late_device(2)).cpu(), x, "between devices");
  expect_same(x.t().to(late_device(1)).t().cpu(), x, "transposed");
  expect_same(x.to(late_device(1), at::kHalf).to(at::kFloat).cpu(), x.to(at::kHalf).to(at::kFloat), "cast");
  const auto pinned = x.pin_memory(late_device().type());
  EXPECT_TRUE(pinned.is_pinned());
  const auto there = pinned.to(late_device(1), /*non_blocking=*/true);
  const auto back = there.to(at::kCPU, /*non_blocking=*/true);
  late::current_stream(1).synchronize();
  EXPECT_TRUE(back.is_pinned());
  expect_same(back, x, "pinned");
  expect_no_fault();
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

TEST(LateDevice, DrawsTheSameNumbersAgain) {
  const auto options = at::TensorOptions(late_device(2)).dtype(at::kFloat);
  const c10::DeviceGuard guard(late_device(2));
  auto generator = at::globalContext().defaultGenerator(late_device(2));
  generator.set_current_seed(5);
  const auto first = at::randn({50}, options);
  const auto state = generator.get_state();
  const auto second = at::dropout(at::ones({50}, options), 0.5, true);
  generator.set_state(state);
  expect_same(at::dropout(at::ones({50}, options), 0.5, true), second.cpu(), "from a state");
  EXPECT_FALSE(first.equal(at::randn({50}, options)));
  generator.set_current_seed(5);
  expect_same(at::randn({50}, options), first.cpu(), "from a seed");
}

TEST(LateDevice, AnOperationThatFailsLaterIsReported) {
  const auto x = numbers();
  const auto rows = at::embedding(x.view({10, 100}), at::full({1}, 10, x.options().dtype(at::kLong)));
  here().synchronize();
  expect_fault({"on stream 0 of device 0, an operation failed", "out of range"});
}

TEST(LateDevice, TrainsAsTheCpuDoes) {
  torch::manual_seed(3);
  torch::nn::Sequential ours(
      torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4), torch::nn::ReLU(), torch::nn::Flatten(),
      torch::nn::Linear(144, 8), torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})), torch::nn::Linear(8, 5));
  torch::nn::Sequential theirs(std::dynamic_pointer_cast<torch::nn::SequentialImpl>(ours->clone()));
  ours->to(late_device(1));
  torch::optim::AdamW our_optimizer(ours->parameters(), 1e-2);
  torch::optim::AdamW their_optimizer(theirs->parameters(), 1e-2);
  for (int step = 0; step < 4; ++step) {
    const auto x = at::randn({6, 3, 8, 8});
    const auto target = at::randint(0, 5, {6});
    const auto train = [&](torch::nn::Sequential& model, torch::optim::AdamW& optimizer, const at::Device& device) {
      optimizer.zero_grad();
      torch::nn::functional::cross_entropy(model->forward(x.to(device)), target.to(device)).backward();
      optimizer.step();
    };
    train(ours, our_optimizer, late_device(1));
    train(theirs, their_optimizer, at::kCPU);
  }
  for (const auto& item : theirs->named_parameters()) {
    expect_same(ours->named_parameters()[item.key()].detach(), item.value().detach(), item.key());
  }
  expect_no_fault();
}

TEST(LateDevice, HasVirtualTime) {
  late::set_costs([](const std::string& name, size_t) {
    return name == "aten::fill_" ? 3.0 : name == "aten::mul" ? 5.0 : 0.0;
  });
  auto x = at::zeros({4}, late_device(6));
  auto y = at::zeros({4}, late_device(6));
  const auto other = new_stream(6);
  wait_for(other, here(6));
  here(6).synchronize();
  const auto begin = late::Device::of(6).host_time();
  x.fill_(1);
  {
    const c10::StreamGuard guard(other);
    y.mul_(2);
    y.mul_(2);
  }
  x.fill_(2);
  wait_for(here(6), other);
  x.fill_(3);
  here(6).synchronize();
  EXPECT_EQ(late::Device::of(6).host_time() - begin, 13);
  late::set_costs({});
}

} // namespace shardwise::test
