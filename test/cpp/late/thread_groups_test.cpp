// What process groups of threads have in common: collectives in the order of streams, with NCCL's rules.
#include "thread_groups.h"

#include "support/expect.h"

#include <barrier>

namespace shardwise::test {
template <typename Group>
class ThreadGroups : public testing::Test {};

namespace {

using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;

struct Names {
  template <typename Group>
  static std::string GetName(int /*index*/) {
    return Own<Group>::kShared ? "OneDevice" : "DevicesOfTheirOwn";
  }
};
using Kinds = testing::Types<late::Group, stream_group::Group>;

} // namespace

TYPED_TEST_SUITE(ThreadGroups, Kinds, Names);

TYPED_TEST(ThreadGroups, ReducesGathersAndScatters) {
  run_ranks(3, [](Rank& rank) {
    const Own<TypeParam> own(rank);
    for (int round = 0; round < 3; ++round) {
      Tensors sum{own.full(own.rank + 1, 2)};
      auto gathered = own.full(0, 3);
      auto one = own.full(10 * own.rank, 1);
      auto many = at::arange(6, sum[0].options()) + own.rank;
      auto scattered = own.full(0, 2);
      Tensors sent{own.full(own.rank, 2)};
      c10d::BroadcastOptions from_one;
      from_one.rootRank = 1;
      const auto works = {
          own.group->allreduce(sum, {}), own.group->_allgather_base(gathered, one, {}),
          own.group->_reduce_scatter_base(scattered, many, {}), own.group->broadcast(sent, from_one)};
      for (const auto& work : works) EXPECT_TRUE(work->wait());
      expect_values(sum[0], {6, 6});
      expect_values(gathered, {0, 10, 20});
      expect_values(scattered, {6.0F * static_cast<float>(own.rank) + 3, 6.0F * static_cast<float>(own.rank) + 6});
      expect_values(sent[0], {1, 1});
    }
    expect_no_fault();
  });
}

TYPED_TEST(ThreadGroups, SendsReceivesAndCoalesces) {
  run_ranks(3, [](Rank& rank) {
    const Own<TypeParam> own(rank);
    const auto next = (own.rank + 1) % own.size;
    const auto previous = (own.rank + 2) % own.size;
    Tensors out{own.full(own.rank)};
    Tensors in{own.full(-1)};
    own.group->startCoalescing();
    own.group->send(out, next, 0);
    own.group->recv(in, previous, 0);
    own.group->endCoalescing()->wait();
    expect_values(in[0], std::vector<float>(6, static_cast<float>(previous)));
    Tensors gathered{own.full(0, 3), own.full(0, 3)};
    Tensors given{own.full(own.rank, 1), own.full(own.rank + 5, 1)};
    own.group->allgather_into_tensor_coalesced(gathered, given, {})->wait();
    expect_values(gathered[0], {0, 1, 2});
    expect_values(gathered[1], {5, 6, 7});
    std::vector<int64_t> even;
    auto exchanged = own.full(0, 3);
    auto mine = at::arange(3, exchanged.options()) + 10 * own.rank;
    own.group->alltoall_base(exchanged, mine, even, even, {})->wait();
    const auto r = static_cast<float>(own.rank);
    expect_values(exchanged, {r, r + 10, r + 20});
    own.group->barrier({})->wait();
    expect_no_fault();
  });
}

TYPED_TEST(ThreadGroups, NoHostWaitsForTheDevice) {
  // What the ranks wait for in the end is on the same device, perhaps.
  std::barrier both(2);
  run_ranks(2, [&](Rank& rank) {
    const Own<TypeParam> own(rank);
    Tensors sum{own.full(1)};
    own.group->allreduce(sum, {})->wait();
    both.arrive_and_wait();
    const auto waits = late::host_waits(own.device.index());
    for (int k = 0; k < 3; ++k) own.group->allreduce(sum, {})->wait();
    sum[0].mul_(2);
    EXPECT_EQ(late::host_waits(own.device.index()), waits);
    both.arrive_and_wait();
    expect_values(sum[0], std::vector<float>(6, 32));
  });
}

TYPED_TEST(ThreadGroups, AResultThatIsReadWithoutItsWaitIsFound) {
  run_ranks(2, [](Rank& rank) {
    const Own<TypeParam> own(rank);
    Tensors sum{own.full(1)};
    const auto work = own.group->allreduce(sum, {});
    const auto y = sum[0] * 2;
    work->wait();
  });
  const auto faults = late::take_faults();
  ASSERT_EQ(faults.size(), 2U);
  EXPECT_NE(faults[0].find("'aten::mul' reads"), std::string::npos) << faults[0];
  const auto* const writes = Own<TypeParam>::kShared ? "'copy' writes" : "'all_reduce' writes";
  EXPECT_NE(faults[0].find(writes), std::string::npos) << faults[0];
}

TYPED_TEST(ThreadGroups, AnInputThatIsFreedBeforeTheEndIsFound) {
  run_ranks(2, [](Rank& rank) {
    const Own<TypeParam> own(rank);
    auto gathered = own.full(0, 12);
    auto one = own.full(1);
    const auto work = own.group->_allgather_base(gathered, one, {});
    one.reset();
    work->wait();
  });
  const auto faults = late::take_faults();
  ASSERT_EQ(faults.size(), 2U);
  EXPECT_NE(faults[0].find("'memory given back' writes"), std::string::npos) << faults[0];
}

TYPED_TEST(ThreadGroups, AMismatchIsTold) {
  run_ranks(2, [](Rank& rank) {
    const Own<TypeParam> own(rank);
    auto out = own.full(0, 4);
    auto in = own.full(0, 2);
    Tensors sum{in};
    // Where the hosts meet, it is told to the last one at once.
    expect_error<std::runtime_error>(
        [&] {
          const auto work = own.rank == 0 ? own.group->allreduce(sum, {}) : own.group->_allgather_base(out, in, {});
          while (!work->isCompleted()) std::this_thread::yield();
          EXPECT_FALSE(work->isSuccess());
          work->wait();
        },
        {"call different collectives as their number 0", "rank 0 all_reduce of 2 Float", "rank 1 all_gather of 2"});
    own.synchronize();
  });
  // On devices of their own there is nobody else to tell it, if no host waits.
  Own<TypeParam>::kShared ? expect_no_fault() : expect_fault({"call different collectives as their number 0"});
}

TYPED_TEST(ThreadGroups, ARankThatDoesNotComeIsNamedAtTheTimeout) {
  run_ranks(2, [](Rank& rank) {
    const Own<TypeParam> own(rank, "short", 200ms);
    if (own.rank == 1) return;
    Tensors sum{own.full(1)};
    const auto work = own.group->allreduce(sum, {});
    while (!work->isCompleted()) std::this_thread::yield();
    expect_error<std::runtime_error>([&] { work->wait(); }, {"timed out after 200 ms", "not there: rank 1"});
    own.synchronize();
  });
  expect_no_fault();
}

TYPED_TEST(ThreadGroups, AnAbortEndsWhoeverWaits) {
  run_ranks(2, [](Rank& rank) {
    const Own<TypeParam> own(rank);
    if (own.rank == 1) {
      own.group->abort();
      return;
    }
    Tensors sum{own.full(1)};
    expect_error<std::runtime_error>(
        [&] {
          const auto work = own.group->allreduce(sum, {});
          while (!work->isCompleted()) std::this_thread::yield();
          work->wait();
        },
        {"aborted"});
    own.synchronize();
  });
}

} // namespace shardwise::test
