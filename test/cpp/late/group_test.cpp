// The late device's process group: collectives on streams of their own, with NCCL's rules.
#include "late_test.h"

#include "late_device/group.h"
#include "support/expect.h"
#include "support/ranks.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace shardwise::test {
namespace {

using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;

/// A rank with a device and a communicator.
struct Own {
  explicit Own(Rank& rank, const std::string& name = "one", std::chrono::milliseconds timeout = 60s)
      : rank(rank.rank()),
        size(rank.world_size()),
        guard(late_device(rank.rank())),
        group(c10::make_intrusive<late::Group>(
            c10::make_intrusive<c10d::PrefixStore>(name, rank.store()), rank.rank(), rank.world_size(),
            late_device(rank.rank()), timeout)) {}
  at::Tensor full(double value, int64_t count = 6) const {
    return at::full({count}, value, at::TensorOptions(late_device(rank)).dtype(at::kFloat));
  }
  int rank;
  int size;
  c10::DeviceGuard guard;
  c10::intrusive_ptr<late::Group> group;
};

void expect_values(const at::Tensor& tensor, const std::vector<float>& wanted) {
  expect_same(tensor, at::tensor(wanted, at::TensorOptions(at::kCPU).dtype(at::kFloat)), "values");
}

} // namespace

TEST(LateGroup, ReducesGathersAndScatters) {
  run_ranks(3, [](Rank& rank) {
    const Own own(rank);
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

TEST(LateGroup, SendsReceivesAndCoalesces) {
  run_ranks(3, [](Rank& rank) {
    const Own own(rank);
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

TEST(LateGroup, WaitsInTheStreamAndNotOnTheHost) {
  run_ranks(2, [](Rank& rank) {
    const Own own(rank);
    Tensors sum{own.full(1)};
    own.group->allreduce(sum, {})->wait();
    late::current_stream(own.rank).synchronize();
    const auto waits = late::host_waits(own.rank);
    for (int k = 0; k < 3; ++k) own.group->allreduce(sum, {})->wait();
    sum[0].mul_(2);
    EXPECT_EQ(late::host_waits(own.rank), waits);
    expect_values(sum[0], std::vector<float>(6, 32));
  });
}

TEST(LateGroup, AResultThatIsReadWithoutItsWaitIsFound) {
  run_ranks(2, [](Rank& rank) {
    const Own own(rank);
    Tensors sum{own.full(1)};
    const auto work = own.group->allreduce(sum, {});
    const auto y = sum[0] * 2;
    work->wait();
  });
  const auto faults = late::take_faults();
  ASSERT_EQ(faults.size(), 2U);
  EXPECT_NE(faults[0].find("'aten::mul' reads"), std::string::npos) << faults[0];
  EXPECT_NE(faults[0].find("'all_reduce' writes"), std::string::npos) << faults[0];
}

TEST(LateGroup, AnInputThatIsFreedBeforeTheEndIsFound) {
  run_ranks(2, [](Rank& rank) {
    const Own own(rank);
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

TEST(LateGroup, AMismatchIsTold) {
  run_ranks(2, [](Rank& rank) {
    const Own own(rank);
    auto out = own.full(0, 4);
    auto in = own.full(0, 2);
    Tensors sum{in};
    const auto work = own.rank == 0 ? own.group->allreduce(sum, {}) : own.group->_allgather_base(out, in, {});
    while (!work->isCompleted()) std::this_thread::yield();
    EXPECT_FALSE(work->isSuccess());
    expect_error<std::runtime_error>([&] { work->wait(); }, {"rank 0 all_reduce of 2 Float", "rank 1 all_gather of 2"});
    late::Device::of(own.rank).synchronize_all();
  });
  expect_fault({"call different collectives as their number 0"});
}

TEST(LateGroup, ARankThatDoesNotComeIsNamedAtTheTimeout) {
  run_ranks(2, [](Rank& rank) {
    const Own own(rank, "short", 200ms);
    if (own.rank == 1) return;
    Tensors sum{own.full(1)};
    const auto work = own.group->allreduce(sum, {});
    while (!work->isCompleted()) std::this_thread::yield();
    expect_error<std::runtime_error>([&] { work->wait(); }, {"timed out after 200 ms", "not there: rank 1"});
    late::Device::of(own.rank).synchronize_all();
  });
  expect_no_fault();
}

TEST(LateGroup, AnAbortEndsWhoeverWaits) {
  run_ranks(2, [](Rank& rank) {
    const Own own(rank);
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
    late::Device::of(own.rank).synchronize_all();
  });
}

// On a busy GPU a communicator may keep another one from running: ranks that call two in different orders then hang.
TEST(LateGroup, CommunicatorsInDifferentOrdersHangOnABusyDevice) {
  const auto both = [](Rank& rank, std::chrono::milliseconds timeout, bool busy) {
    const Own a(rank, "a", timeout);
    const Own b(rank, "b", timeout);
    Tensors sum{a.full(1)};
    Tensors other{a.full(1)};
    const auto one = (rank.rank() == 0 ? a : b).group->allreduce(sum, {});
    while (busy && !late::OneCommunicatorAtATime::is_busy(rank.rank())) std::this_thread::yield();
    const auto two = (rank.rank() == 0 ? b : a).group->allreduce(other, {});
    while (!one->isCompleted() || !two->isCompleted()) std::this_thread::yield();
    // Once one has timed out, the other has the device.
    EXPECT_EQ(one->isSuccess() && two->isSuccess(), !busy);
    late::Device::of(rank.rank()).synchronize_all();
  };
  run_ranks(2, [&](Rank& rank) { both(rank, 60s, false); });
  const late::OneCommunicatorAtATime busy;
  run_ranks(2, [&](Rank& rank) { both(rank, 300ms, true); });
  late::take_faults();
}

TEST(LateGroup, AMeshThatEndsWithAnErrorWaitsForNobody) {
  run_ranks(2, [](Rank& rank) {
    const auto store = c10::make_intrusive<c10d::PrefixStore>("its own mesh", rank.store());
    const auto options =
        MeshOptions().device(rank.device()).timeout(20s).store(store).rank(rank.rank()).world_size(rank.world_size());
    const auto stumble = [&] {
      const Mesh mesh({{"world", rank.world_size()}}, options);
      if (rank.rank() == 1) return;
      // The other rank never comes.
      Tensors sum{torch::ones({4}, rank.device())};
      mesh.group("world")->allreduce(sum);
      throw std::runtime_error("what the program stumbled over");
    };
    const auto begin = std::chrono::steady_clock::now();
    try {
      stumble();
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), std::string("what the program stumbled over"));
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
  });
  late::take_faults();
}

TEST(LateGroup, TakesAsLongAsTheLastRank) {
  late::set_costs([](const std::string& name, size_t) {
    return name == "aten::fill_" ? 7.0 : name == "all_reduce" ? 2.0 : 0.0;
  });
  run_ranks(2, [](Rank& rank) {
    const Own own(rank);
    Tensors sum{own.full(1)};
    late::current_stream(own.rank).synchronize();
    own.group->barrier({})->wait();
    const auto begin = std::max(late::Device::of(0).host_time(), late::Device::of(1).host_time());
    for (int k = 0; k <= 2 * own.rank; ++k) sum[0].fill_(1);
    own.group->allreduce(sum, {})->wait();
    late::current_stream(own.rank).synchronize();
    EXPECT_EQ(late::Device::of(own.rank).host_time() - begin, 7 * 3 + 2);
  });
  late::set_costs({});
}

} // namespace shardwise::test
