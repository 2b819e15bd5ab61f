// Gathers and sums in memory that their process groups provide.
#include "late_device/group.h"
#include "late_test.h"
#include "ranks/hybrid_models.h"
#include "support/expect.h"

namespace shardwise::test {
namespace {

/// The tensors of collectives that lay in their group's memory, and elsewhere, while `act` ran.
template <typename Act>
late::Group::MemoryUse memory_use_of(Rank& rank, const Act& act) {
  const auto before = late::Group::memory_use(rank.rank());
  act();
  const auto after = late::Group::memory_use(rank.rank());
  return {after.own - before.own, after.elsewhere - before.elsewhere};
}

/// Trains with it from the third step on, beside the same model without it: bit for bit the same. Returns what the last
/// steps used.
template <typename Wrap>
late::Group::MemoryUse train_in_own_memory(Rank& rank, const Wrap& wrap) {
  Stack ours, other;
  auto units = wrap(ours);
  wrap(other);
  torch::optim::AdamW mine(ours->parameters(), torch::optim::AdamWOptions(0.02));
  torch::optim::AdamW theirs(other->parameters(), torch::optim::AdamWOptions(0.02));
  const auto step = [&](Stack& model, torch::optim::Optimizer& optimizer, int k) {
    optimizer.zero_grad();
    stack_loss(model, k, rank.rank()).backward();
    optimizer.step();
  };
  for (int k = 0; k < 2; ++k) step(ours, mine, k);
  for (auto& unit : units) unit.set_memory_from_process_group(true);
  for (int k = 2; k < 5; ++k) step(ours, mine, k);
  const auto allocations = units.back().counters().allocations;
  const auto use = memory_use_of(rank, [&] {
    for (int k = 5; k < 8; ++k) step(ours, mine, k);
  });
  EXPECT_EQ(units.back().counters().allocations, allocations);
  for (int k = 0; k < 8; ++k) step(other, theirs, k);
  const auto got = full_state_dict(ours);
  for (const auto& entry : full_state_dict(other)) {
    EXPECT_TRUE(at::equal(got[entry.key()].cpu(), entry.value().cpu())) << entry.key();
  }
  EXPECT_GT(use.own, 0);
  return use;
}

late::Group::MemoryUse train_in_own_memory(Rank& rank, const FullyShardOptions& options) {
  return train_in_own_memory(rank, [&](Stack& model) {
    std::vector<Unit> units;
    for (auto& block : *model->blocks) units.push_back(fully_shard(*block, options));
    units.push_back(fully_shard(model, options));
    return units;
  });
}

} // namespace

TEST(LateOwnMemory, EveryGatherAndSumLiesInIt) {
  run_ranks(2, [](Rank& rank) {
    const auto halves = MixedPrecision().param_dtype(at::kBFloat16).reduce_dtype(at::kFloat);
    for (const auto& options :
         {sharded_on(rank), sharded_on(rank).layout(ShardLayout::flat), sharded_on(rank).reshard_after_forward(false),
          sharded_on(rank).cpu_offload(CpuOffload()), sharded_on(rank).mixed_precision(halves)}) {
      EXPECT_EQ(train_in_own_memory(rank, options).elsewhere, 0);
    }
    const auto copies = [&](Stack& model) {
      return std::vector<Unit>{replicate(model, ReplicateOptions().mesh(rank.mesh()))};
    };
    EXPECT_EQ(train_in_own_memory(rank, copies).elsewhere, 0);
  });
}

TEST(LateOwnMemory, ItDoesNotGoWithCollectivesOfTheUsersOwn) {
  run_ranks(2, [](Rank& rank) {
    auto model = mlp({5, 4, 3});
    auto root = fully_shard(model, sharded_on(rank));
    const CustomCollective custom = [](at::Tensor& output, at::Tensor& input, c10d::ProcessGroup& group) {
      return group._allgather_base(output, input);
    };
    root.set_memory_from_process_group(true);
    expect_error<ValueError>(
        [&] { root.set_custom_all_gather(custom); }, {"cannot combine memory of the process group"});
    root.set_memory_from_process_group(false).set_custom_all_gather(custom);
    expect_error<ValueError>([&] { root.set_memory_from_process_group(true); }, {"Choose one of the two"});
  });
}

} // namespace shardwise::test
