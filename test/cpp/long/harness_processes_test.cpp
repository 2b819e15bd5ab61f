// The harness for ranks as processes: how each ended, and what the parent says of it.
#include "support/expect.h"
#include "support/port.h"
#include "support/processes.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <torch/torch.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <set>
#include <thread>

namespace shardwise::test {
namespace {

TEST(HarnessProcesses, RanksAreProcessesWithAnEnvironment) {
  ProcessOptions options;
  options.environment = {{"SHARDWISE_COLOUR", "blue"}};
  const auto fn = [](Rank& rank) {
    EXPECT_EQ(std::getenv("RANK"), std::to_string(rank.rank()));
    EXPECT_STREQ(std::getenv("WORLD_SIZE"), "3");
    EXPECT_STREQ(std::getenv("MASTER_ADDR"), "127.0.0.1");
    EXPECT_STREQ(std::getenv("SHARDWISE_COLOUR"), "blue");
    std::vector<at::Tensor> processes{torch::full({1}, static_cast<int64_t>(getpid()))};
    std::vector<std::vector<at::Tensor>> all{{}};
    for (int k = 0; k < 3; ++k) all[0].push_back(torch::zeros(1, torch::kLong));
    rank.mesh().group("world")->allgather(all, processes)->wait();
    EXPECT_NE(all[0][0].item<int64_t>(), all[0][1].item<int64_t>());
    EXPECT_NE(all[0][1].item<int64_t>(), all[0][2].item<int64_t>());
    std::cout << "I am " << rank.name() << std::endl;
    std::cerr << "and say so twice" << std::endl;
  };
  const auto results = run_processes(3, fn, options);
  ASSERT_EQ(results.size(), 3);
  for (int k = 0; k < 3; ++k) {
    EXPECT_TRUE(results[k].ok()) << results[k].how();
    expect_text(results[k].output, {c10::str("I am rank ", k, " of 3"), "and say so twice"});
  }
}

TEST(HarnessProcesses, RanksStartWithBrokenPipesDeadly) {
  // A mesh that this process once had may have ignored them, and a new program inherits that.
  const auto before = std::signal(SIGPIPE, is_rank_process() ? SIG_DFL : SIG_IGN);
  run_processes(1, [&](Rank&) { EXPECT_EQ(before, SIG_DFL); });
  std::signal(SIGPIPE, before);
}

TEST(HarnessProcesses, AKilledRankShows) {
  ProcessOptions options;
  options.may_fail = {1};
  const auto fn = [](Rank& rank) {
    if (rank.rank() == 1) raise(SIGKILL);
  };
  const auto results = run_processes(2, fn, options);
  EXPECT_TRUE(results[0].ok());
  EXPECT_EQ(results[1].signal, SIGKILL);
  EXPECT_EQ(results[1].exit_code, -1);
  EXPECT_EQ(results[1].how(), "signal 9");
}

TEST(HarnessProcesses, AnUnexpectedEndFailsTheTest) {
  if (inner()) {
    run_processes(2, [](Rank& rank) {
      if (rank.rank() == 1) throw std::runtime_error("the cause");
      // Ends later than the other, so that the order in which they are told is known.
      std::this_thread::sleep_for(std::chrono::seconds(1));
      EXPECT_TRUE(false) << "an expectation";
    });
    return;
  }
  const auto ended = run_inner();
  EXPECT_EQ(ended.exit_code, 1) << ended.how() << ended.output;
  expect_text(
      ended.output, {"rank 1 of 2: exit code 1 after", "rank 1 of 2 failed: the cause",
                     "rank 0 of 2: exit code 1 after", "an expectation", "[  FAILED  ]"});
  EXPECT_LT(ended.output.find("the cause"), ended.output.find("an expectation"));
}

TEST(HarnessProcesses, ExpectationOfOneRankFailsTheTest) {
  if (inner()) {
    run_processes(2, [](Rank& rank) { EXPECT_EQ(rank.rank(), 0) << "on purpose"; });
    return;
  }
  const auto ended = run_inner();
  EXPECT_EQ(ended.exit_code, 1) << ended.how() << ended.output;
  expect_text(ended.output, {"rank 1 of 2: exit code 1", "on purpose"});
  EXPECT_EQ(ended.output.find("rank 0 of 2: "), std::string::npos) << ended.output;
}

TEST(HarnessProcesses, TimeLimitShowsStepsAndStacks) {
  if (inner()) {
    ProcessOptions options;
    options.time_limit = std::chrono::seconds(15);
    const auto fn = [](Rank& rank) {
      rank.step(c10::str("backward ", rank.rank()));
      if (rank.rank() == 1) rank.store()->get("a key that nobody sets");
    };
    run_processes(2, fn, options);
    return;
  }
  const auto ended = run_inner();
  EXPECT_EQ(ended.exit_code, 1) << ended.how() << ended.output;
  expect_text(ended.output, {"rank 1 of 2: ended at the time limit", "last step: backward 1", "TCPStore"});
}

TEST(HarnessProcesses, ASecondCallIsRefused) {
  if (inner()) {
    run_processes(1, [](Rank&) {});
    run_processes(1, [](Rank&) {});
    return;
  }
  const auto ended = run_inner();
  EXPECT_EQ(ended.exit_code, 1) << ended.how() << ended.output;
  expect_text(ended.output, {"a test calls run_processes or run_torchrun once"});
}

TEST(HarnessProcesses, ARankThatNeverGetsThereFails) {
  if (inner()) {
    ASSERT_FALSE(is_rank_process());
    run_processes(1, [](Rank&) {});
    return;
  }
  const auto ended = run_inner();
  EXPECT_EQ(ended.exit_code, 1) << ended.how() << ended.output;
  expect_text(ended.output, {"rank 0 of 1: exit code 98", "without reaching run_processes"});
}

TEST(HarnessProcesses, NoRankOutlivesItsParent) {
  if (inner()) {
    run_processes(2, [](Rank& rank) {
      rank.store()->add("here", 1);
      if (rank.rank() == 0) {
        while (rank.store()->add("here", 0) < 2) std::this_thread::sleep_for(std::chrono::milliseconds(10));
        kill(getppid(), SIGKILL);
      }
      std::this_thread::sleep_for(std::chrono::seconds(600));
    });
    return;
  }
  // Everything that descends from here holds the pipe's other end.
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_EQ(run_inner().signal, SIGKILL);
  close(ends[1]);
  pollfd closed{ends[0], POLLIN, 0};
  EXPECT_EQ(poll(&closed, 1, 30000), 1) << "a rank still runs";
  close(ends[0]);
}

TEST(HarnessProcesses, TorchrunStartsRanks) {
  const auto ended = run_torchrun(2, [](Rank& rank) {
    EXPECT_STREQ(std::getenv("WORLD_SIZE"), "2");
    std::cout << c10::str("I am ", rank.name(), "\n") << std::flush;
  });
  expect_text(ended.output, {"I am rank 0 of 2", "I am rank 1 of 2"});
}

TEST(HarnessProcesses, PortsDiffer) {
  std::set<int> numbers;
  std::vector<std::unique_ptr<Port>> ports;
  for (int i = 0; i < 50; ++i) {
    ports.push_back(std::make_unique<Port>());
    numbers.insert(ports.back()->number());
  }
  EXPECT_EQ(numbers.size(), 50);
}

} // namespace
} // namespace shardwise::test
