// A rank that does something else than units, or nothing: the others say so in seconds, and what both do.
#include "ranks/fully_shard_models.h"
#include "ranks/transport_groups.h"

#include <atomic>
#include <chrono>
#include <thread>

namespace shardwise::test {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// A mesh of its own, whose direct transport goes the way of the running test.
Mesh make_mesh(Rank& rank, c10::intrusive_ptr<c10d::Store> store = {}, std::chrono::milliseconds timeout = 60s) {
  auto options = rank.mesh_options("apart").device(at::kCPU).timeout(timeout).shared_memory(through_shared_memory());
  if (store) options.store(store);
  return Mesh({{"world", rank.world_size()}}, options);
}

/// All ranks train some steps; then the last one does something else while the others go on with a step.
template <typename Expected = Error>
void expect_apart(
    int world, const std::function<void(Stack&, const Mesh&)>& differ, const std::vector<std::string>& parts,
    int steps = 3) {
  run_ranks(world, [&](Rank& rank) {
    auto mesh = make_mesh(rank);
    auto both = stacks(rank, FullyShardOptions().mesh(mesh), 5, 1);
    both.train(stack_loss, steps);
    const auto begin = Clock::now();
    const auto step = [&] { stack_loss(both.ours, steps, rank.rank()).backward(); };
    if (rank.rank() == world - 1) {
      expect_error<Expected>([&] { differ(both.ours, mesh); }, parts);
    } else {
      expect_error<Error>(step, parts);
    }
    EXPECT_LT(Clock::now() - begin, 30s) << rank.name();
    mesh.shutdown();
  });
}

/// Answers nothing while it is stuck, as one behind a network that drops everything.
class StuckStore : public c10d::PrefixStore {
 public:
  StuckStore(c10::intrusive_ptr<c10d::Store> store, const std::atomic<bool>& stuck)
      : PrefixStore("stuck", std::move(store)),
        stuck_(stuck) {}
  using c10d::PrefixStore::wait;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    answer();
    PrefixStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    answer();
    return PrefixStore::get(key);
  }
  bool check(const std::vector<std::string>& keys) override {
    answer();
    return PrefixStore::check(keys);
  }
  int64_t add(const std::string& key, int64_t value) override {
    answer();
    return PrefixStore::add(key, value);
  }

 private:
  void answer() const {
    while (stuck_) std::this_thread::sleep_for(10ms);
  }
  const std::atomic<bool>& stuck_;
};

} // namespace

TEST(RanksApart, AStateDictAfterAStepLess) {
  expect_apart(
      2, [](Stack& model, const Mesh&) { full_state_dict(model); },
      {"rank 0 waits for the all-gather of unit", "rank 1 is about to start full_state_dict of 8 names"});
  expect_apart(
      2,
      [](Stack& model, const Mesh&) { load_full_state_dict(model, StateDict(), LoadStateDictOptions().strict(false)); },
      {"rank 0 waits for the all-gather of unit", "rank 1 is about to start load_full_state_dict of 8 names"});
}

TEST(RanksApart, ANormAfterAStepLess) {
  expect_apart(
      3, [](Stack& model, const Mesh&) { clip_grad_norm_(*model, 1.0); },
      {"rank 0 waits for the all-gather of unit", "rank 2 is about to start the all-reduce of clip_grad_norm_"});
}

// A loop that clips has the same steps each time.
TEST(RanksApart, NormsAreComparedNoMoreOnceAProgramIsSteady) {
  run_ranks(2, [](Rank& rank) {
    Stack ours(5, 1);
    auto root = shard_stack(ours, sharded_on(rank));
    const auto step = [&](int number) {
      stack_loss(ours, number, rank.rank()).backward();
      clip_grad_norm_(*ours, 1.0);
    };
    for (int number = 0; number < 3; ++number) step(number);
    const auto before = root.counters().comparisons;
    for (int number = 3; number < 6; ++number) step(number);
    EXPECT_EQ(root.counters().comparisons, before);
    // What is rare costs its own comparison, and changes no step.
    full_state_dict(*ours);
    step(6);
    EXPECT_EQ(root.counters().comparisons, before + 1);
  });
}

/// The two ways of the direct transport.
class RanksApartWays : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    through_shared_memory() = GetParam();
  }
};
INSTANTIATE_TEST_SUITE_P(, RanksApartWays, testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "SharedMemory" : "Tcp");
});

TEST_P(RanksApartWays, ACallOfTheProgramItself) {
  const auto barrier = [](Stack&, const Mesh& mesh) { mesh.group("world")->barrier()->wait(); };
  expect_apart<c10::DistBackendError>(
      2, barrier, {"rank 0 waits for the all-gather of unit", "rank 1 waits for the program's own barrier"});
  const auto all_reduce = [](Stack&, const Mesh& mesh) {
    std::vector<at::Tensor> tensors{torch::ones({7})};
    mesh.group("world")->allreduce(tensors)->wait();
  };
  // The others compare, for it is their first step.
  expect_apart<c10::DistBackendError>(
      3, all_reduce,
      {"rank 0 is about to start the all-gather of unit",
       "rank 2 waits for the program's own all_reduce of 7 elements"},
      0);
}

TEST_P(RanksApartWays, ACallOfTheProgramThatIsLateIsNoError) {
  run_ranks(3, [](Rank& rank) {
    auto mesh = make_mesh(rank);
    auto both = stacks(rank, FullyShardOptions().mesh(mesh), 5, 1);
    both.train(stack_loss, 3);
    // Rank 0 made the call, and waits for a unit of rank 1, which waits for the call: for rank 2 makes it late.
    std::vector<at::Tensor> tensors{torch::ones({7})};
    if (rank.rank() == 2) std::this_thread::sleep_for(3500ms);
    const auto work = mesh.group("world")->allreduce(tensors);
    if (rank.rank() == 1) work->wait();
    both.train(stack_loss, 2, 3);
    work->wait();
    EXPECT_EQ(tensors[0][0].item<float>(), 3);
  });
}

// T46: the limit of the mesh holds whatever the store does.
TEST(RanksApart, AStoreThatDoesNotAnswer) {
  std::atomic<bool> stuck = false;
  run_ranks(2, [&](Rank& rank) {
    auto mesh = make_mesh(rank, c10::make_intrusive<StuckStore>(rank.store(), stuck), 4s);
    auto both = stacks(rank, FullyShardOptions().mesh(mesh), 5, 1);
    both.train(stack_loss, 3);
    if (rank.rank() == 1) return rank.store()->wait({"gave up"}, 60s);
    stuck = true;
    const auto begin = Clock::now();
    expect_error<PeerError>([&] { stack_loss(both.ours, 3, 0).backward(); }, {"rank 0", "the all-gather of unit"});
    EXPECT_LT(Clock::now() - begin, 20s);
    stuck = false;
    rank.store()->set("gave up", "1");
  });
}

TEST(RanksApart, UnitsOfTheSameName) {
  run_ranks(2, [](Rank& rank) {
    std::vector<Stack> models{Stack(5, 1), Stack(5, 1)};
    for (auto& model : models) shard_stack(model, sharded_on(rank));
    expect_error<Error>(
        [&] { stack_loss(models[rank.rank()], 0, rank.rank()).backward(); },
        {"rank 0 is about to start the all-gather of unit", "rank 1 is about to start",
         "of another unit of the same name"});
    rank.close();
  });
}

TEST(RanksApart, ErrorsCallRanksByTheirNumbersInTheMesh) {
  run_ranks(4, [](Rank& rank) {
    const auto mesh = rank.mesh({{"replicate", 2}, {"shard", 2}});
    std::vector<at::Tensor> tensors{torch::ones({3 + rank.rank()})};
    const auto first = rank.rank() / 2 * 2;
    expect_error<c10::DistBackendError>(
        [&] { mesh.group("shard")->allreduce(tensors)->wait(); },
        {c10::str("rank ", first, " calls an all-reduce (sum) of ", 3 + first),
         c10::str("rank ", first + 1, " calls an all-reduce (sum) of ", 4 + first)});
  });
}

} // namespace shardwise::test
