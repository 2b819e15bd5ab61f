// What process groups of threads have in common: collectives in the order of streams, with NCCL's rules.
#include "late_device/group.h"
#include "late_test.h"
#include "stream_group/group.h"
#include "support/expect.h"
#include "support/ranks.h"
#include "thread_group/streams.h"

#include <optional>

namespace shardwise::test {

/// A rank with a communicator, of one or the other kind of groups of threads: on a device of its own, or on one that
/// all share, where it has a stream.
template <typename Group>
struct Own {
  static constexpr bool kShared = std::is_same_v<Group, stream_group::Group>;

  explicit Own(Rank& rank)
      : rank(rank.rank()),
        device(late_device(kShared ? 0 : rank.rank())),
        guard(device),
        group(c10::make_intrusive<Group>(
            rank.store(), rank.rank(), rank.world_size(), device, std::chrono::seconds(60))) {
    if constexpr (kShared) on.emplace(borrowed.emplace(device).get());
  }
  at::Tensor full(double value, int64_t count = 6) const {
    return at::full({count}, value, at::TensorOptions(device).dtype(at::kFloat));
  }
  void synchronize() const {
    late::Device::of(device).synchronize_all();
  }

  int rank;
  at::Device device;
  c10::DeviceGuard guard;
  std::optional<thread_group::BorrowedStream> borrowed;
  std::optional<c10::StreamGuard> on;
  c10::intrusive_ptr<Group> group;
};

template <typename Group>
class ThreadGroups : public testing::Test {};

namespace {

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

} // namespace shardwise::test
