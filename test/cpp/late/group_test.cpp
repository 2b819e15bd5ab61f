// What only the late device's own process group has: NCCL's ways on a device that is busy, and virtual time.
#include "thread_groups.h"

namespace shardwise::test {
namespace {

using namespace std::chrono_literals;
using Tensors = std::vector<at::Tensor>;

} // namespace

// On a busy GPU a communicator may keep another one from running: ranks that call two in different orders then hang.
TEST(LateGroup, CommunicatorsInDifferentOrdersHangOnABusyDevice) {
  const auto both = [](Rank& rank, std::chrono::milliseconds timeout, bool busy) {
    const Own<late::Group> a(rank, "a", timeout);
    const Own<late::Group> b(rank, "b", timeout);
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
    const Own<late::Group> own(rank);
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
