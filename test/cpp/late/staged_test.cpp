// The direct transport with tensors of a device: through the host's memory.
#include "late_test.h"
#include "ranks/sharded_models.h"
#include "ranks/transport_groups.h"
#include "support/expect.h"

namespace shardwise::test::staged {
namespace {

using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;

/// A rank on a device of its own, and its back end.
struct Own {
  explicit Own(Rank& rank, std::chrono::milliseconds timeout = 60s)
      : rank(rank.rank()),
        size(rank.world_size()),
        guard(late_device(rank.rank())),
        backend(make_backend(rank, "staged", timeout)) {}
  at::Tensor full(double value, int64_t count, at::ScalarType dtype = at::kFloat) const {
    return at::full({count}, value, at::TensorOptions(late_device(rank)).dtype(dtype));
  }
  int rank;
  int size;
  c10::DeviceGuard guard;
  BackendPtr backend;
};

void expect_values(const at::Tensor& tensor, const std::vector<double>& wanted) {
  expect_same(tensor.cpu().to(at::kDouble), at::tensor(wanted, at::TensorOptions(at::kCPU).dtype(at::kDouble)), "it");
}

} // namespace

TEST(LateStaged, CarriesWhatTheBackEndCarries) {
  run_ranks(3, [](Rank& rank) {
    const Own own(rank);
    const auto me = own.rank;
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
      SCOPED_TRACE(dtype);
      const auto full = [&](double value, int64_t count) { return own.full(value, count, dtype); };
      Tensors sum{full(me + 1, 2)}, most{full(me, 2)}, two{full(me, 1), full(2 * me, 3)}, sent{full(me, 2)};
      Tensors reduced{full(me, 2)};
      auto gathered = full(-1, 3), one = full(10 * me, 1), scattered = full(-1, 2), many = full(me, 6);
      std::vector<Tensors> lists{{full(-1, 2), full(-1, 2), full(-1, 2)}},
          shares{{full(me, 2), full(me + 1, 2), full(me + 2, 2)}};
      Tensors mine{full(me, 2)}, share{full(-1, 2)}, both{full(-1, 3), full(-1, 6)}, parts{full(me, 1), full(me, 2)};
      Tensors less{full(-1, 1), full(-1, 2)}, wholes{full(me, 3), full(me, 6)}, dealt{full(-1, 1)};
      std::vector<Tensors> collected, deals;
      if (me == 1) {
        collected.push_back({full(-1, 2), full(-1, 2), full(-1, 2)});
        deals.push_back({full(5, 1), full(6, 1), full(7, 1)});
      }
      auto exchanged = full(-1, 3), given = at::arange(3, many.options()) + 10 * me;
      std::vector<int64_t> even;
      auto& group = *own.backend;
      const std::vector<WorkPtr> works{
          group.allreduce(sum, {}),
          group.allreduce(most, {.reduceOp = c10d::ReduceOp::MAX}),
          group.allreduce_coalesced(two, {}),
          group._allgather_base(gathered, one, {}),
          group._reduce_scatter_base(scattered, many, {}),
          group.allgather(lists, mine, {}),
          group.reduce_scatter(share, shares, {}),
          group.allgather_into_tensor_coalesced(both, parts, {}),
          group.reduce_scatter_tensor_coalesced(less, wholes, {}),
          group.broadcast(sent, {.rootRank = 1}),
          group.reduce(reduced, {.rootRank = 1}),
          group.gather(collected, mine, {.rootRank = 1}),
          group.scatter(dealt, deals, {.rootRank = 1}),
          group.alltoall_base(exchanged, given, even, even, {})};
      for (const auto& work : works) EXPECT_TRUE(work->wait());
      expect_values(sum[0], {6, 6});
      expect_values(most[0], {2, 2});
      expect_values(two[0], {3});
      expect_values(two[1], {6, 6, 6});
      expect_values(gathered, {0, 10, 20});
      expect_values(scattered, {3, 3});
      for (int other = 0; other < 3; ++other) expect_values(lists[0][other], std::vector<double>(2, other));
      expect_values(share[0], std::vector<double>(2, 3 + 3 * me));
      expect_values(both[0], {0, 1, 2});
      expect_values(both[1], {0, 0, 1, 1, 2, 2});
      expect_values(less[0], {3});
      expect_values(less[1], {3, 3});
      expect_values(sent[0], {1, 1});
      expect_values(dealt[0], {5.0 + me});
      expect_values(exchanged, {0.0 + me, 10.0 + me, 20.0 + me});
      if (me == 1) {
        expect_values(reduced[0], {3, 3});
        for (int other = 0; other < 3; ++other) expect_values(collected[0][other], std::vector<double>(2, other));
      }
    }
    expect_no_fault();
  });
}

TEST(LateStaged, KeepsTheOrderOfTensorsOnTheHostAndOnTheDevice) {
  run_ranks(2, [](Rank& rank) {
    const Own own(rank);
    for (int round = 0; round < 20; ++round) {
      Tensors there{own.full(own.rank + round, 3)};
      Tensors here{at::full({5}, own.rank + round, at::TensorOptions(at::kCPU).dtype(at::kFloat))};
      const auto first = own.backend->allreduce(there, {});
      const auto second = own.backend->allreduce(here, {});
      EXPECT_TRUE(second->wait());
      EXPECT_TRUE(first->wait());
      expect_values(there[0], std::vector<double>(3, 2 * round + 1));
      expect_values(here[0], std::vector<double>(5, 2 * round + 1));
    }
    expect_no_fault();
  });
}

TEST(LateStaged, AFailureIsRaisedByItsWaitAndByTheNextCall) {
  run_ranks(2, [](Rank& rank) {
    const Own own(rank, 300ms);
    Tensors sum{own.full(1, 3)};
    if (own.rank == 1) {
      rank.store()->wait({"given up"});
      return;
    }
    for (const auto* call : {"the wait", "the next call"}) {
      SCOPED_TRACE(call);
      expect_error<c10::DistBackendError>([&] { own.backend->allreduce(sum, {})->wait(); }, {"rank 1"});
    }
    rank.store()->set("given up", "yes");
  });
  late::take_faults();
}

/// Nobody waits for it, and its tensors are gone before it is done.
TEST(LateStaged, WhatIsNotWaitedForWritesToNobodysMemory) {
  run_ranks(2, [](Rank& rank) {
    const Own own(rank);
    for (int round = 0; round < 20; ++round) {
      {
        Tensors sum{own.full(own.rank, 300)};
        own.backend->allreduce(sum, {});
      }
      const auto next = own.full(round, 300);
      expect_values(next.sum().view({1}), {300.0 * round});
    }
    Tensors last{own.full(own.rank, 3)};
    EXPECT_TRUE(own.backend->allreduce(last, {})->wait());
    expect_values(last[0], {1, 1, 1});
    expect_no_fault();
  });
}

} // namespace shardwise::test::staged
