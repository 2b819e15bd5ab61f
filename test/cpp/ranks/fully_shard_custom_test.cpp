// Collectives and hooks of the user's own, and what several roots share.
#include "ranks/hybrid_models.h"
#include "ranks/training_models.h"

#include "base/caller.h"
#include "support/expect.h"

namespace shardwise::test {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

CustomCollective counted(int& calls, const CustomCollective& collective) {
  return [&calls, collective](at::Tensor& output, at::Tensor& input, c10d::ProcessGroup& group) {
    ++calls;
    return collective(output, input, group);
  };
}

/// Is carried out when somebody waits for it.
class GatherOnDemand : public c10d::Work {
 public:
  GatherOnDemand(const at::Tensor& output, const at::Tensor& input, c10d::ProcessGroup& group, int& waited)
      : output_(output),
        input_(input),
        group_(group),
        waited_(waited) {}
  bool isCompleted() override {
    return done_;
  }
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    if (std::exchange(done_, true)) return true;
    ++waited_;
    return group_._allgather_base(output_, input_)->wait();
  }

 private:
  at::Tensor output_, input_;
  c10d::ProcessGroup& group_;
  int& waited_;
  bool done_ = false;
};

/// In place of Python's lock, which a thread holds that calls a module's forward from there.
thread_local bool holds_lock = false;
thread_local char released;

void* release_lock() {
  return std::exchange(holds_lock, false) ? &released : nullptr;
}

void take_lock(void* /*released*/) {
  holds_lock = true;
}

} // namespace

TEST(FullyShardCustom, CollectivesOfTheUsersOwn) {
  for (const int world : {2, 3}) {
    run_ranks(world, [](Rank& rank) {
      auto both = stacks(rank, sharded_on(rank));
      int gathers = 0;
      int scatters = 0;
      auto block = unit(*both.ours->block(0));
      block.set_custom_all_gather(counted(gathers, gather_by_broadcasts));
      block.set_custom_reduce_scatter(counted(scatters, scatter_by_all_reduce));
      const auto before = block.counters();
      both.train(stack_loss, 3);
      ASSERT_EQ(gathers, 6);
      ASSERT_EQ(scatters, 3);
      // They are counted like the ones whose place they take.
      ASSERT_EQ(block.counters().all_gathers - before.all_gathers, 6);
      ASSERT_EQ(block.counters().reduce_scatters - before.reduce_scatters, 3);
      block.set_custom_all_gather({});
      block.set_custom_reduce_scatter({});
      both.train(stack_loss, 2, 10);
      ASSERT_EQ(gathers, 6);
      ASSERT_EQ(scatters, 3);
    });
  }
}

TEST(FullyShardCustom, OneThatFailsIsNamed) {
  run_ranks(2, [](Rank& rank) {
    auto both = stacks(rank, sharded_on(rank));
    auto block = unit(*both.ours->block(1));
    block.set_custom_all_gather(
        [](at::Tensor&, at::Tensor&, c10d::ProcessGroup&) -> Work { throw std::runtime_error("out of order today"); });
    expect_error<PeerError>(
        [&] { stack_loss(both.ours, 0, rank.rank()); },
        {"the all-gather of unit 'blocks.1'", "blocks.1.up.weight", "out of order today"});
    block.set_custom_all_gather({});
    block.reset();
    both.train(stack_loss, 3);
  });
}

TEST(FullyShardCustom, AGatherThatIsGivenUpIsWaitedFor) {
  // Else its memory would serve others while it is written.
  for (const auto layout : {ShardLayout::rows, ShardLayout::flat}) {
    run_ranks(2, [&](Rank& rank) {
      auto ours = shallow_stack();
      auto root = shard_stack(ours, sharded_on(rank).layout(layout));
      int started = 0;
      int waited = 0;
      auto block = unit(*ours->block(0));
      block.set_custom_all_gather([&](at::Tensor& output, at::Tensor& input, c10d::ProcessGroup& group) -> Work {
        ++started;
        return c10::make_intrusive<GatherOnDemand>(output, input, group, waited);
      });
      for (int step = 0; step < 3; ++step) {
        block.unshard(/*async=*/true);
        ASSERT_EQ(started, waited + 1) << "it is under way";
        block.reshard();
        ASSERT_EQ(started, waited);
        stack_loss(ours, step, rank.rank()).backward();
        ASSERT_EQ(started, waited);
      }
    });
  }
}

TEST(FullyShardCustom, AllReduceHook) {
  // It sees this rank's part of the sum of all, after the second sum where there are two, and may change it.
  for (const auto grid : std::vector<Grid>{{1, 2}, {2, 2}, {2, 1}}) {
    run_ranks(grid.world(), [&](Rank& rank) {
      auto both = stacks(rank, hybrid_on(rank, grid));
      both.shards = grid.shards;
      int called = 0;
      torch::Tensor size;
      auto block = unit(*both.ours->block(0));
      block.set_all_reduce_hook([&](at::Tensor& sum) {
        ++called;
        size = sum.mul_(3).abs().sum();
      });
      block.set_requires_all_reduce(false);
      both.backward(stack_loss, 0);
      ASSERT_EQ(called, 0) << "there is nothing to see of a sum that is put aside";
      block.set_requires_all_reduce(true);
      for (auto& parameter : both.ours->parameters()) parameter.mutable_grad() = torch::Tensor();
      both.reference->zero_grad();
      both.backward(stack_loss, 1);
      reference_backward(rank, [&](int r) { return stack_loss(both.reference, 0, r); });
      for (auto& parameter : both.reference->block(0)->parameters()) parameter.mutable_grad().mul_(3);
      auto expected = torch::zeros_like(size);
      for (const auto& parameter : both.ours->block(0)->parameters()) expected += parameter.grad().abs().sum();
      assert_pieces(*both.ours->block(0), *both.reference->block(0), rank, "the sum", {}, grid.shards);
      assert_close(size, expected, "nothing lies between gradients");
      block.set_all_reduce_hook({});
      both.optimize();
      both.backward(stack_loss, 2);
      ASSERT_EQ(called, 1);
    });
  }
}

TEST(FullyShardCustom, MemoryOfAProcessGroupThatHasNone) {
  run_ranks(2, [](Rank& rank) {
    auto model = mlp({5, 4, 3});
    auto root = fully_shard(model, sharded_on(rank));
    // The back end of the late device has memory; test/cpp/late/own_memory_test.cpp.
    if (!rank.device().is_cpu()) return;
    expect_error<Error>(
        [&] { root.set_memory_from_process_group(true); },
        {"the process group for the gathers on cpu", "offers no memory of its own"});
    root.set_memory_from_process_group(false);
    auto copies = mlp({5, 4, 3});
    auto replicated = replicate(copies, ReplicateOptions().mesh(rank.mesh()));
    expect_error<Error>([&] { replicated.set_memory_from_process_group(true); }, {"for the sums of gradients"});
  });
}

TEST(FullyShardShareCommContext, ShareCommContext) {
  // Three roots, one after the other in a forward, with one pool of buffers.
  for (const bool shared : {false, true}) {
    run_ranks(2, [&](Rank& rank) {
      const auto make = [] { return mlps(16, 3); };
      auto ours = make();
      std::vector<Unit> roots;
      for (size_t i = 0; i < 3; ++i) roots.push_back(fully_shard(ours->ptr(i), sharded_on(rank)));
      if (shared) share_comm_context(roots);
      share_comm_context({});
      Pair<torch::nn::Sequential> both{rank, ours, make()};
      both.train(
          [](torch::nn::Sequential& model, int step, int r) { return call(*model, batch(step, r, 16)).pow(2).sum(); },
          4);
      int64_t allocations = 0;
      for (const auto& root : roots) allocations += root.counters().allocations;
      // Each root keeps its sums. On a device it also keeps its full parameters; shared are a buffer for gathers and
      // one for buckets.
      const bool has_pool = !rank.device().is_cpu();
      ASSERT_EQ(allocations, 3 + (!has_pool ? 0 : shared ? 3 + 2 : 3 * (1 + 2))) << shared;
    });
  }
}

// A thread of torch's Gloo lets go of what it finished, which needs Python's lock, and holds meanwhile what the start
// of the next collective needs.
TEST(FullyShardCustom, CollectivesStartWithoutTheLockOfTheCallersLanguage) {
  base::set_caller({.release = release_lock, .take = take_lock}, nullptr);
  run_ranks(2, [](Rank& rank) {
    auto ours = shallow_stack();
    auto root = shard_stack(ours, sharded_on(rank));
    auto block = unit(*ours->block(0));
    int started = 0;
    const auto expect_free = [&](const CustomCollective& collective) -> CustomCollective {
      return [&, collective](at::Tensor& output, at::Tensor& input, c10d::ProcessGroup& group) {
        EXPECT_FALSE(holds_lock);
        ++started;
        return collective(output, input, group);
      };
    };
    block.set_custom_all_gather(expect_free(gather_by_broadcasts));
    block.set_custom_reduce_scatter(expect_free(scatter_by_all_reduce));
    holds_lock = true;
    stack_loss(ours, 0, rank.rank()).backward();
    EXPECT_TRUE(holds_lock);
    EXPECT_EQ(started, 3);
    holds_lock = false;
  });
  base::set_caller({}, nullptr);
}

} // namespace shardwise::test
