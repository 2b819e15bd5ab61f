// What the direct transport says when ranks disagree, are late, are gone or leave; and that it ends in time.
#include "comm/collectives/collectives.h"
#include "support/expect.h"
#include "support/processes.h"
#include "support/ranks.h"
#include "transport_groups.h"

#include <shardwise/error.h>

#include <thread>

namespace shardwise::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

void expect_failure(const WorkPtr& work, const std::vector<std::string>& parts) {
  expect_error<c10::DistBackendError>([&] { work->wait(); }, parts);
  EXPECT_TRUE(work->isCompleted() && !work->isSuccess());
}

// Gloo ends the process of a rank that gets more than it asked for.
TRANSPORT_TEST(RanksThatDisagreeAreToldAndGoOn) {
  run_with_backends(3, [](Rank& rank, c10d::Backend& backend) {
    const bool other = rank.rank() == 1;
    const auto mine = c10::str("rank ", rank.rank(), " of 3");
    for (const int64_t scale : {1, 10000}) {
      const auto sizes = start_all_reduce(backend, torch::ones({other ? 32 * scale : 16 * scale}));
      expect_failure(
          sizes, {mine, c10::str(16 * scale, " elements"), c10::str(32 * scale, " elements"), "Nothing was"});
      expect_sum(rank, backend);
      const auto n = 8 * scale;
      const auto kinds = other ? start_all_gather(backend, torch::zeros({3 * n}), torch::ones({n}))
                               : start_reduce_scatter(backend, torch::zeros({n}), torch::ones({3 * n}));
      expect_failure(kinds, {mine, "an all-gather of", "a reduce-scatter (sum) of"});
      const auto op = other ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
      expect_failure(start_all_reduce(backend, torch::ones({n}), op), {mine, "(maximum)", "(sum)"});
      const auto dtypes = start_all_reduce(backend, torch::ones({n}, other ? at::kInt : at::kFloat));
      expect_failure(dtypes, {mine, "of Int", "of Float"});
      c10d::BroadcastOptions options;
      options.rootRank = other ? 1 : 0;
      std::vector<at::Tensor> tensors{torch::ones({n})};
      expect_failure(backend.broadcast(tensors, options), {mine, "with root 0", "with root 1"});
    }
    expect_sum(rank, backend);
  });
}

TRANSPORT_TEST(BadTensors) {
  run_with_backends(2, [](Rank&, c10d::Backend& backend) {
    const auto check = [](const std::function<void()>& call, const std::string& text) {
      expect_error<c10::ValueError>(call, {text});
    };
    const auto strided = torch::ones({4, 4}).narrow(1, 0, 2);
    check([&] { start_all_reduce(backend, strided); }, "without gaps");
    check(
        [&] { start_all_gather(backend, torch::ones({7}), torch::ones({3})); },
        "an output of 2 times as many elements as the input, and got an output of 7 and an input of 3");
    check(
        [&] { start_all_gather(backend, torch::ones({3}, at::kInt), torch::ones({3})); },
        "the same dtype, and got an output of Int and an input of Float");
    check([&] { start_reduce_scatter(backend, strided, torch::ones({8})); }, "contiguous");
    // Dense in another order of dimensions is fine, as for Gloo.
    start_all_reduce(backend, torch::ones({4, 4}).t())->wait();
  });
}

TRANSPORT_TEST(ALateRankIsNamed) {
  run_with_backends(3, [](Rank& rank, c10d::Backend& backend) {
    expect_sum(rank, backend);
    if (rank.rank() == 2) {
      rank.store()->wait({"0 gave up"});
      const auto work = start_all_reduce(backend, torch::ones({50000}));
      expect_failure(work, {"rank 2 of 3", "an all-reduce (sum) of 50000 elements of Float", "closed the connection"});
      return;
    }
    const auto begin = Clock::now();
    // Of the call alone, or of the group.
    const auto given = rank.rank() == 0 ? 300ms : c10d::kUnsetTimeout;
    const auto work = start_all_reduce(backend, torch::ones({50000}), c10d::ReduceOp::SUM, given);
    if (rank.rank() == 0) {
      expect_failure(
          work, {"rank 0 of 3", "an all-reduce (sum) of 50000 elements of Float", "rank 2 did not send within 300 ms"});
      EXPECT_LT(Clock::now() - begin, 20s);
      // Nothing more can be sent; the first failure is told again.
      expect_failure(start_all_reduce(backend, torch::ones({5})), {"earlier collective", "rank 2 did not send"});
      rank.store()->set("0 gave up", "1");
    } else {
      // It hears at once that others gave up, and in shared memory why.
      expect_failure(work, {"rank 1 of 3", "closed the connection"});
      if (through_shared_memory()) {
        expect_failure(work, {"because rank 0 failed first", "rank 0 of 3", "rank 2 did not send within 300 ms"});
      }
      EXPECT_LT(Clock::now() - begin, 20s);
    }
  });
}

TRANSPORT_TEST(ShutdownEndsWhatIsUnderWay) {
  run_with_backends(2, [](Rank& rank, c10d::Backend& backend) {
    if (rank.rank() == 1) {
      rank.store()->wait({"under way"});
      backend.shutdown();
      return;
    }
    // Rank 1 does not come: one works, the other waits.
    std::vector<WorkPtr> works;
    for (int i = 0; i < 2; ++i) works.push_back(start_all_reduce(backend, torch::ones({30000})));
    std::this_thread::sleep_for(50ms);
    const auto begin = Clock::now();
    backend.shutdown();
    EXPECT_LT(Clock::now() - begin, 5s);
    for (const auto& work : works) expect_failure(work, {"rank 0 of 2", "an all-reduce", "was shut down on this rank"});
    const auto more = [&] { start_all_reduce(backend, torch::ones({3})); };
    expect_error<c10::DistBackendError>(more, {"was shut down"});
    std::vector<at::Tensor> tensors{torch::ones({3})};
    expect_error<c10::DistBackendError>([&] { backend.send(tensors, 1, 0); }, {"was shut down"});
    backend.shutdown();
    rank.store()->set("under way", "1");
  });
}

// In the middle of a large one; the unit's name is the caller's part.
TEST(TransportSameHost, ADeadRankIsNamedWithTheUnit) {
  ProcessOptions options;
  options.may_fail = {2};
  const auto ended = run_processes(
      3,
      [](Rank& rank) {
        const auto lines = comm::axis_groups_of(rank.mesh());
        const comm::Collectives collectives(lines[0]);
        Counters counters;
        const auto tensor = torch::ones({4 << 20});
        collectives.all_reduce(tensor, "the sum of 'blocks.1'", counters).wait();
        if (rank.rank() == 2) raise_later(20ms, SIGKILL);
        const auto begin = Clock::now();
        const auto train = [&] {
          for (;;) collectives.all_reduce(tensor, "the sum of 'blocks.1'", counters).wait();
        };
        expect_error<PeerError>(
            train, {c10::str("rank ", rank.rank(), ":"), "the sum of 'blocks.1' failed",
                    "an all-reduce (sum) of 4194304", "because rank 2 died: its process ended",
                    "if there is none, it left the program earlier than the others"});
        EXPECT_LT(Clock::now() - begin, 20s);
      },
      options);
  EXPECT_EQ(ended[2].signal, SIGKILL);
}

// A future's callback runs on the transport's thread, and may let go of the last of it.
TRANSPORT_TEST(TheLastHoldIsACallbacks) {
  run_ranks(2, [](Rank& rank) {
    auto backend = make_backend(rank, "callback");
    const auto held = std::make_shared<BackendPtr>(backend);
    const auto work = start_all_reduce(*backend, torch::ones({50000}));
    work->getFuture()->addCallback([held](c10::ivalue::Future&) { held->reset(); });
    backend.reset();
    work->wait();
    for (int i = 0; i < 400 && *held; ++i) std::this_thread::sleep_for(5ms);
    EXPECT_FALSE(*held) << rank.name();
  });
}

} // namespace
} // namespace shardwise::test
