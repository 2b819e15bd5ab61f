// The harness for ranks as threads: which error wins, and what a failure leaves behind.
#include "support/expect.h"
#include "support/ranks.h"

#include <shardwise/error.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <latch>
#include <set>
#include <thread>

namespace shardwise::test {
namespace {

void all_reduce(const Mesh& mesh) {
  std::vector<at::Tensor> tensors{torch::ones(4)};
  mesh.group("world")->allreduce(tensors)->wait();
}

RankFailure failure_of(int n, const std::function<void(Rank&)>& fn) {
  try {
    run_ranks(n, fn);
  } catch (const RankFailure& failure) {
    return failure;
  }
  throw std::logic_error("run_ranks raised nothing");
}

TEST(Harness, RanksAreThreadsWithNumbers) {
  for (const int n : {1, 2, 5}) {
    std::vector<std::thread::id> threads(n);
    run_ranks(n, [&](Rank& rank) {
      EXPECT_EQ(rank.world_size(), n);
      threads.at(rank.rank()) = std::this_thread::get_id();
    });
    const std::set<std::thread::id> distinct(threads.begin(), threads.end());
    EXPECT_EQ(distinct.size(), n);
    EXPECT_FALSE(distinct.contains(std::thread::id()));
  }
}

TEST(Harness, RanksShareAStore) {
  run_ranks(3, [](Rank& rank) {
    if (rank.rank() == 2) rank.store()->set("word", std::string("hello"));
    EXPECT_EQ(rank.store()->get_to_str("word"), "hello");
  });
}

TEST(Harness, MeshIsMadeOnceForItsAxes) {
  run_ranks(2, [](Rank& rank) {
    const auto world = rank.mesh();
    EXPECT_EQ(world.axes(), (std::vector<Axis>{{"world", 2}}));
    EXPECT_EQ(world.group("world"), rank.mesh().group("world"));
    const auto other = rank.mesh({{"replicate", 2}, {"shard", 1}});
    EXPECT_EQ(other.describe(), c10::str("Mesh(replicate=2, shard=1; rank ", rank.rank(), " on cpu, shared memory)"));
    all_reduce(world);
  });
}

TEST(Harness, GeneratorsDifferByRankAndRepeat) {
  const auto draw = [](uint64_t seed) {
    std::vector<at::Tensor> draws(2);
    run_ranks(2, [&](Rank& rank) { draws[rank.rank()] = torch::rand(16, rank.generator()); }, {.seed = seed});
    return draws;
  };
  const auto draws = draw(7);
  EXPECT_FALSE(at::equal(draws[0], draws[1]));
  EXPECT_TRUE(at::equal(draws[0], draw(7)[0]));
  EXPECT_TRUE(at::equal(draws[1], draw(8)[0]));
}

TEST(Harness, ErrorNamesItsRank) {
  const auto failure = failure_of(3, [](Rank& rank) {
    if (rank.rank() == 1) throw ValueError("no such thing");
  });
  EXPECT_EQ(failure.rank(), 1);
  EXPECT_STREQ(failure.what(), "rank 1 of 3: no such thing");
  EXPECT_THROW(std::rethrow_exception(failure.cause()), ValueError);
}

TEST(Harness, FirstErrorInTimeWins) {
  for (const int first : {0, 2}) {
    std::latch thrown(1);
    const auto failure = failure_of(3, [&](Rank& rank) {
      struct Throws {
        std::latch& thrown;
        ~Throws() {
          thrown.count_down();
        }
      };
      if (rank.rank() == first) {
        // The others go on while this rank's error is on its way.
        const Throws throws{thrown};
        throw std::runtime_error("the cause");
      }
      thrown.wait();
      std::this_thread::sleep_for(std::chrono::seconds(1));
      throw std::runtime_error("later");
    });
    EXPECT_EQ(failure.rank(), first);
    const auto cause = c10::str("rank ", first, " of 3: the cause\n  then rank ");
    EXPECT_EQ(std::string(failure.what()).find(cause), 0) << failure.what();
  }
}

TEST(Harness, CauseWinsOverErrorsThatBlameAPeer) {
  for (const bool typed : {false, true}) {
    std::latch blamed(1);
    const auto failure = failure_of(2, [&](Rank& rank) {
      if (rank.rank() == 0) {
        blamed.count_down();
        if (typed) throw PeerError("rank 1 is gone");
        throw std::runtime_error("[pair.cc:1] Connection closed by peer [127.0.0.1]:1");
      }
      blamed.wait();
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      throw std::runtime_error("out of memory");
    });
    EXPECT_EQ(failure.rank(), 1);
    expect_text(failure.what(), {"rank 1 of 2: out of memory", "then rank 0 of 2: "});
  }
}

TEST(Harness, AFailedRankDoesNotKeepTheOthersWaiting) {
  const auto start = std::chrono::steady_clock::now();
  const auto failure = failure_of(4, [](Rank& rank) {
    all_reduce(rank.mesh());
    if (rank.rank() == 3) throw std::runtime_error("the cause");
    all_reduce(rank.mesh());
  });
  EXPECT_EQ(failure.rank(), 3);
  expect_text(failure.what(), {"rank 3 of 4: the cause", "rank 0 of 4", "rank 1 of 4", "rank 2 of 4"});
  // The timeout of the meshes is 60 s.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(40));
}

TEST(Harness, ThrownThingsNeedNoType) {
  const auto failure = failure_of(2, [](Rank& rank) {
    if (rank.rank() == 0) throw 5;
  });
  expect_text(failure.what(), {"rank 0 of 2", "no std::exception"});
}

TEST(Harness, ExpectationOfOneRankFailsTheTest) {
  if (inner()) {
    run_ranks(2, [](Rank& rank) { EXPECT_EQ(rank.rank(), 0) << "on purpose"; });
    return;
  }
  const auto ended = run_inner();
  EXPECT_EQ(ended.exit_code, 1) << ended.how() << ended.output;
  expect_text(ended.output, {"on purpose", "rank 1 of 2", "[  FAILED  ]"});
  EXPECT_EQ(ended.output.find("rank 0 of 2"), std::string::npos) << ended.output;
}

TEST(Harness, AssertionOfOneRankEndsTheOthers) {
  if (inner()) {
    const auto failure = failure_of(2, [](Rank& rank) {
      all_reduce(rank.mesh());
      ASSERT_EQ(rank.rank(), 0) << "on purpose";
      all_reduce(rank.mesh());
    });
    std::cout << "raised: " << failure.what() << std::endl;
    return;
  }
  const auto ended = run_inner();
  EXPECT_EQ(ended.exit_code, 1) << ended.how() << ended.output;
  expect_text(ended.output, {"on purpose", "raised: rank 1 of 2: an assertion failed", "then rank 0 of 2"});
  EXPECT_LT(ended.after, std::chrono::seconds(40));
}

} // namespace

/// Known to the linker, so that a stack shows its name.
void hang_on_purpose() {
  while (true) std::this_thread::sleep_for(std::chrono::milliseconds(100));
}

namespace {

TEST(Harness, TimeLimitShowsStepsAndStacks) {
  if (inner()) {
    const auto fn = [](Rank& rank) {
      rank.step(c10::str("first things of ", rank.rank()));
      rank.step(c10::str("forward of layer ", rank.rank()));
      if (rank.rank() == 1) hang_on_purpose();
      rank.store()->get("a key that nobody sets");
    };
    run_ranks(2, fn, {.time_limit = std::chrono::seconds(2)});
    return;
  }
  const auto ended = run_inner();
  EXPECT_EQ(ended.exit_code, 124) << ended.how();
  expect_text(
      ended.output, {"TIME LIMIT: Harness.TimeLimitShowsStepsAndStacks has not finished within 2000 ms",
                     "the main thread", "rank 0 of 2", "last step: forward of layer 0", "rank 1 of 2",
                     "last step: forward of layer 1", "hang_on_purpose", "HashStore"});
  EXPECT_EQ(ended.output.find("first things"), std::string::npos) << ended.output;
}

TEST(Harness, TimeLimitOfAnyTest) {
  if (inner()) hang_on_purpose();
  const auto ended = run_inner({{"SHARDWISE_TEST_TIME_LIMIT", "1"}});
  EXPECT_EQ(ended.exit_code, 124) << ended.how();
  expect_text(
      ended.output,
      {"TIME LIMIT: Harness.TimeLimitOfAnyTest has not finished within 1000 ms", "the main thread", "hang_on_purpose"});
}

TEST(Harness, TimeLimitMustBeANumber) {
  if (inner()) return;
  const auto ended = run_inner({{"SHARDWISE_TEST_TIME_LIMIT", "soon"}});
  EXPECT_EQ(ended.exit_code, 2) << ended.how();
  expect_text(ended.output, {"SHARDWISE_TEST_TIME_LIMIT is 'soon'"});
}

} // namespace
} // namespace shardwise::test
