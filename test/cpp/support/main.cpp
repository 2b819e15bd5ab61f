#include "support/processes.h"
#include "support/test_device.h"
#include "support/time_limit.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>

#include <csignal>
#include <cstdlib>
#include <iostream>
#include <memory>

namespace shardwise::test {
namespace {

/// Gives every test its time limit. A rank process has none: the process that started it watches the time.
class LimitTests : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override {
    limit_ = std::make_unique<TimeLimit>(is_rank_process() ? TimeLimit::kUnlimited : default_time_limit());
  }
  void OnTestEnd(const testing::TestInfo&) override {
    limit_.reset();
  }

  std::unique_ptr<TimeLimit> limit_;
};

} // namespace
} // namespace shardwise::test

int main(int argc, char** argv) {
  using namespace shardwise::test;
  testing::InitGoogleTest(&argc, argv);
  if (is_rank_process()) prctl(PR_SET_PDEATHSIG, SIGKILL);
  // Ranks share the cores of one machine.
  at::set_num_threads(1);
  // c10d's flight recorder belongs to the process and is not safe for ranks that are threads: it must not record.
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
  // Ranks that are processes cannot share devices of one.
  if (!is_rank_process()) set_up_test_device();
  start_time_watch();
  const WatchedThread watched("the main thread");
  testing::UnitTest::GetInstance()->listeners().Append(new LimitTests);
  const int status = RUN_ALL_TESTS();
  if (!is_rank_process()) return status;
  std::cerr << "This rank's process ended its test without reaching run_processes(): either what comes before failed, "
               "or the test calls it twice.\n";
  return 98;
}
