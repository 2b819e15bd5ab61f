// Ranks as threads on one device: what SHARDWISE_TEST_DEVICE makes of it, in programs that are started anew.
#include "late_test.h"

#include "support/processes.h"
#include "support/ranks.h"
#include "support/test_device.h"

#include <mutex>
#include <set>
#include <thread>

namespace shardwise::test {
namespace {

/// This test again, with another device.
Ended again(const std::string& device) {
  return run_commands({this_test({{"SHARDWISE_TEST_DEVICE", device}})}, std::chrono::seconds(60)).front();
}

} // namespace

TEST(SharedDevice, EachRankHasAStreamAndComputesItsBackwards) {
  if (test_device() != "late_shared") {
    const auto ended = again("late_shared");
    EXPECT_TRUE(ended.ok()) << ended.how() << "\n" << ended.output;
    return;
  }
  std::mutex mutex;
  std::set<c10::StreamId> streams;
  std::vector<at::Tensor> left(3);
  run_ranks(3, [&](Rank& rank) {
    EXPECT_EQ(rank.device(), late_device(0));
    const auto stream = late::current_stream(0);
    const auto x = torch::ones({3}).requires_grad_();
    EXPECT_EQ(x.device(), rank.device());
    std::thread::id thread;
    x.register_hook([&](const at::Tensor&) {
      thread = std::this_thread::get_id();
      EXPECT_EQ(late::current_stream(0), stream);
    });
    (x * 2).sum().backward();
    EXPECT_EQ(thread, std::this_thread::get_id());
    const std::lock_guard lock(mutex);
    streams.insert(stream.id());
    left[rank.rank()] = x.grad();
  });
  EXPECT_EQ(streams.size(), 3U);
  EXPECT_EQ(streams.count(0), 0U) << "the stream of whoever has none";
  // What ranks leave behind may be read without a word of their streams.
  for (const auto& tensor : left) expect_same(tensor, torch::full({3}, 2.0F), "gradient");
}

TEST(SharedDevice, WithoutAGpuTestsOnCudaAreSkippedAndSayWhy) {
  if (test_device() == "cuda") return;
  const auto ended = again("cuda");
  EXPECT_TRUE(ended.ok()) << ended.output;
  if (torch::cuda::is_available()) return;
  EXPECT_NE(ended.output.find("SHARDWISE_TEST_DEVICE is cuda: torch finds no GPU"), std::string::npos) << ended.output;
  EXPECT_NE(ended.output.find("[  SKIPPED ] 1 test"), std::string::npos) << ended.output;
}

TEST(SharedDevice, AnUnknownDeviceIsAnErrorThatNamesTheOthers) {
  const auto ended = again("gpu");
  EXPECT_FALSE(ended.ok());
  EXPECT_NE(ended.output.find("it may be cpu, late, late_shared or cuda"), std::string::npos) << ended.output;
}

} // namespace shardwise::test
