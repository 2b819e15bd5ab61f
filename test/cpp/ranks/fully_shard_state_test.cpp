// full_state_dict(): what it gives is the plain module's, whenever it is called, and nothing else changes.
#include "ranks/state_models.h"

namespace shardwise::test {
TEST(FullyShardStateDict, LeavesEverythingAsItWas) {
  // R51: a dict that is made before, in the middle of or after a step changes nothing in it.
  on_worlds([](Rank& rank) {
    for (const auto& options : layouts(rank)) {
      Stack ours, quiet;
      auto root = shard_stack(ours, options);
      const auto quiet_root = shard_stack(quiet, options);
      torch::optim::AdamW mine(ours->parameters(), torch::optim::AdamWOptions(0.02));
      torch::optim::AdamW theirs(quiet->parameters(), torch::optim::AdamWOptions(0.02));
      // Versions, what is freed, and what the units did.
      const auto seen = [&] {
        const auto counters = root.counters();
        std::vector<int64_t> all{counters.unshards, counters.reshards, counters.reduce_scatters};
        for (const auto& shard : ours->parameters()) all.push_back(shard._version());
        std::vector<torch::Tensor> members{ours->head->weight};
        for (size_t i = 0; i < 3; ++i) members.push_back(ours->block(i)->up->weight);
        for (const auto& member : members) {
          all.push_back(member._version());
          all.push_back(group::is_freed(member));
        }
        return all;
      };
      const auto save = [&] {
        const auto before = seen();
        full_state_dict(ours);
        ASSERT_EQ(seen(), before);
      };
      for (int step = 0; step < 4; ++step) {
        save();
        auto loss = stack_loss(ours, step, rank.rank());
        save();
        loss.backward();
        save();
        stack_loss(quiet, step, rank.rank()).backward();
        mine.step();
        theirs.step();
        assert_same(*ours, *quiet, c10::str("step ", step), assert_equal);
        mine.zero_grad();
        theirs.zero_grad();
      }
      ASSERT_EQ(root.counters().unshards, quiet_root.counters().unshards) << "kept copies stayed good";
    }
  });
}

TEST(FullyShardStateDict, GathersEveryUnitOnce) {
  on_worlds([](Rank& rank) {
    Stack ours;
    auto root = shard_stack(ours, sharded_on(rank));
    stack_loss(ours, 0, rank.rank()).backward();
    full_state_dict(ours);
    const auto of_block = unit(*ours->block(1)).counters();
    const auto before = root.counters();
    full_state_dict(ours);
    const auto after = root.counters();
    ASSERT_EQ(unit(*ours->block(1)).counters().all_gathers - of_block.all_gathers, 1);
    // Four units, and what the ranks tell each other before: lengths and texts.
    ASSERT_EQ(after.all_gathers - before.all_gathers, 4 + 2);
    ASSERT_EQ(after.broadcasts, before.broadcasts);
    ASSERT_EQ(after.allocations, before.allocations) << "the buffers of training do";
    // A part of the module gathers its own unit alone.
    const auto part = full_state_dict(*ours->head);
    ASSERT_EQ(part.keys(), std::vector<std::string>{"weight"});
    ASSERT_EQ(part["weight"].sizes(), (std::vector<int64_t>{11, 6}));
    ASSERT_EQ(root.counters().all_gathers - after.all_gathers, 1 + 2);
  });
}

TEST(FullyShardStateDict, EveryKindOnAllRanksAndOnRank0) {
  on_worlds([](Rank& rank) {
    for (const auto& options : layouts(rank)) {
      Zoo ours;
      const Zoo reference;
      shard_zoo(ours, rank, options);
      const auto dict = full_state_dict(ours);
      assert_state(dict, plain_state(*reference), "the zoo");
      const auto on_rank0 = full_state_dict(ours, FullStateDictOptions().rank0_only(true).cpu_offload(true));
      if (rank.rank() == 0) assert_state(on_rank0, plain_state(*reference), "rank 0");
      ASSERT_EQ(on_rank0.is_empty(), rank.rank() > 0);
      for (const auto& item : on_rank0) ASSERT_TRUE(item.value().device().is_cpu());
      // As torch's: parameters and buffers of a module, then those of its children.
      std::vector<std::string> keys;
      for (const auto& entry : reference->named_modules()) {
        const auto path = entry.key().empty() ? "" : entry.key() + ".";
        for (const auto& own : entry.value()->named_parameters(/*recurse=*/false)) keys.push_back(path + own.key());
        for (const auto& own : entry.value()->named_buffers(/*recurse=*/false)) keys.push_back(path + own.key());
      }
      ASSERT_EQ(dict.keys(), keys);
      ASSERT_TRUE(dict["again.weight"].is_same(dict["sharded.weight"]));
      ASSERT_FALSE(dict["sharded.weight"].is_alias_of(dict["sharded.bias"]));
    }
  });
}

TEST(FullyShardStateDict, IsACopy) {
  // R53: what was saved stays, whatever training, loading and freeing comes after it.
  on_worlds([](Rank& rank) {
    StateDict dict;
    std::map<std::string, torch::Tensor> before;
    {
      Zoo ours;
      shard_zoo(ours, rank, sharded_on(rank));
      ours->forward(batch(0, 0, 4));
      {
        const c10::InferenceMode guard;
        dict = full_state_dict(ours);
      }
      for (const auto& item : dict) {
        ASSERT_FALSE(item.value().is_inference());
        before[item.key()] = item.value().clone();
      }
      zoo_loss(ours, 0, rank.rank()).backward();
      descend(*ours->sharded, 0.02);
      ASSERT_FALSE(torch::equal(full_state_dict(ours)["sharded.weight"], before["sharded.weight"]));
      ASSERT_FALSE(torch::equal(full_state_dict(ours)["norm.running_mean"], before["norm.running_mean"]));
      const torch::NoGradGuard guard;
      for (auto& parameter : ours->parameters()) parameter.zero_();
    }
    assert_state(dict, before, "later");
  });
}

TEST(FullyShardStateDict, AFailureOnOneRankIsThatOfAll) {
  run_ranks(3, [](Rank& rank) {
    Stack ours, reference;
    shard_stack(ours, sharded_on(rank));
    const auto shard = ours->head->parameters()[0];
    const auto data = shard.detach().clone();
    if (rank.rank() == 1) shard.set_data(torch::ones({5}));
    const std::vector<std::string> parts{"rank 1", "'head.weight'", "was replaced", "[5]"};
    expect_error<Error>([&] { full_state_dict(ours); }, parts);
    expect_error<Error>([&] { load_full_state_dict(ours, full_state_dict(reference)); }, parts);
    if (rank.rank() == 1) shard.set_data(data);
    unit(*ours->block(1)).unshard(/*async=*/true);
    assert_state(full_state_dict(ours), plain_state(*reference), "repaired, and while a unit is on its way");
    expect_error<Error>(
        [&] { rank.rank() == 2 ? full_state_dict(*ours->block(0)) : full_state_dict(*ours->block(1)->up); },
        {"rank 0 calls full_state_dict of 2 names, 'weight' to 'bias', but rank 2", "of 6 names"});
    Pair<Stack>{rank, ours, reference}.train(stack_loss, 3);
  });
}

} // namespace shardwise::test
