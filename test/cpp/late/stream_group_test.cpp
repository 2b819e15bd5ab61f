// What is different where ranks share a device: their hosts meet, and the last one issues for all.
#include "thread_groups.h"

#include "support/expect.h"

#include <barrier>
#include <future>

namespace shardwise::test {
namespace {

using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;
using Shared = Own<stream_group::Group>;

} // namespace

TEST(StreamGroup, ACallNeverWaitsForOtherRanks) {
  std::barrier both(2);
  run_ranks(2, [&](Rank& rank) {
    const Shared own(rank);
    Tensors sum{own.full(rank.rank() + 1)};
    // Rank 1 calls only when rank 0 has come back from its call.
    if (own.rank == 1) both.arrive_and_wait();
    const auto work = own.group->allreduce(sum, {});
    if (own.rank == 0) {
      EXPECT_FALSE(work->isCompleted());
      both.arrive_and_wait();
    }
    work->wait();
    expect_values(sum[0], std::vector<float>(6, 3));
  });
}

TEST(StreamGroup, AnOutputMayHoldTheInput) {
  run_ranks(3, [](Rank& rank) {
    const Shared own(rank);
    auto whole = own.full(0, 3);
    auto mine = whole.narrow(0, own.rank, 1);
    mine.fill_(own.rank + 5);
    own.group->_allgather_base(whole, mine, {})->wait();
    expect_values(whole, {5, 6, 7});
    // One that another rank reads is written last.
    auto many = at::arange(3, whole.options()) + own.rank;
    auto sum = many.narrow(0, own.rank, 1);
    own.group->_reduce_scatter_base(sum, many, {})->wait();
    expect_values(sum, {3.0F * static_cast<float>(own.rank) + 3});
  });
}

TEST(StreamGroup, AResultIsThereForWhoeverIsInTheStreamOrder) {
  run_ranks(2, [](Rank& rank) {
    const Shared own(rank);
    Tensors sum{own.full(1)};
    c10d::AllreduceOptions at_once;
    at_once.asyncOp = false;
    own.group->allreduce(sum, at_once);
    expect_values(sum[0] * 2, std::vector<float>(6, 4));
    const auto work = own.group->allreduce(sum, {});
    const auto called = std::make_shared<std::promise<void>>();
    work->getFuture()->addCallback([called](c10::ivalue::Future&) { called->set_value(); });
    // In its stream, as wait().
    work->getFuture()->wait();
    called->get_future().wait();
    expect_values(work->getFuture()->value().toTensorVector()[0], std::vector<float>(6, 4));
    expect_no_fault();
  });
}

TEST(StreamGroup, RanksMayCallTwoCommunicatorsInDifferentOrdersButNotWaitForThem) {
  run_ranks(2, [](Rank& rank) {
    const Shared a(rank, "a", 300ms);
    const Shared b(rank, "b", 300ms);
    const auto& first = rank.rank() == 0 ? a : b;
    const auto& second = rank.rank() == 0 ? b : a;
    Tensors sum{a.full(1)};
    Tensors other{a.full(1)};
    const auto one = first.group->allreduce(sum, {});
    const auto two = second.group->allreduce(other, {});
    one->wait();
    two->wait();
    expect_error<std::runtime_error>(
        [&] {
          first.group->allreduce(sum, {})->wait();
          second.group->allreduce(other, {})->wait();
        },
        {"all_reduce of 6 Float", "timed out after 300 ms"});
    a.synchronize();
  });
}

TEST(StreamGroup, ACallOfWhatNoGroupKnowsIsToldToAll) {
  run_ranks(2, [](Rank& rank) {
    const Shared own(rank);
    Tensors bits{at::ones({2}, at::TensorOptions(own.device).dtype(at::kInt))};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::BXOR;
    expect_error<std::runtime_error>(
        [&] { own.group->allreduce(bits, options)->wait(); }, {"this reduction is not known"});
    // And the group stays as it is.
    expect_error<std::runtime_error>([&] { own.group->allreduce(bits, {}); }, {"this reduction is not known"});
    own.synchronize();
  });
}

TEST(StreamGroup, WhoeverGoesOnHasHisMemoryForHimself) {
  std::barrier both(2);
  run_ranks(2, [&](Rank& rank) {
    const Shared own(rank);
    both.arrive_and_wait();
    const auto before = late::Device::of(0).used();
    both.arrive_and_wait();
    {
      Tensors sum{own.full(1, 1000)};
      own.group->allreduce(sum, {})->wait();
    }
    both.arrive_and_wait();
    EXPECT_EQ(late::Device::of(0).used(), before);
  });
}

TEST(StreamGroup, ALateRankIsToldAtItsCall) {
  std::barrier both(2);
  run_ranks(2, [&](Rank& rank) {
    const Shared own(rank, "short", 100ms);
    Tensors sum{own.full(1)};
    if (own.rank == 1) both.arrive_and_wait();
    expect_error<std::runtime_error>([&] { own.group->allreduce(sum, {})->wait(); }, {"not there: rank 1"});
    if (own.rank == 0) both.arrive_and_wait();
  });
}

} // namespace shardwise::test
