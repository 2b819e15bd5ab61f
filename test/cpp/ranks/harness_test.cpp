#include "support/processes.h"
#include "support/ranks.h"

#include <gtest/gtest.h>

namespace shardwise::test {
namespace {

TEST(Harness, RanksRun) {
  std::atomic<int> sum = 0;
  run_ranks(3, [&](Rank& rank) { sum += rank.rank() + 10 * rank.world_size(); });
  EXPECT_EQ(sum, 93);
}

TEST(Harness, ProcessesRun) {
  const auto results = run_processes(2, [&](Rank& rank) { std::cout << "I am " << rank.name() << "\n"; });
  EXPECT_NE(results[1].output.find("I am rank 1 of 2"), std::string::npos) << results[1].output;
}

TEST(Harness, TorchrunRuns) {
  const auto ended = run_torchrun(2, [&](Rank& rank) { std::cout << "I am " << rank.name() << "\n"; });
  EXPECT_NE(ended.output.find("I am rank 1 of 2"), std::string::npos) << ended.output;
}

} // namespace
} // namespace shardwise::test
