// full_state_dict(): what it gives is the plain module's, whenever it is called, and nothing else changes.
#include "ranks/state_models.h"

namespace shardwise::test {
namespace {

void train_zoo(Zoo& model, int rank, int first, int steps = 3) {
  torch::optim::AdamW optimizer(model->sharded->parameters(), torch::optim::AdamWOptions(0.02));
  for (int step = first; step < first + steps; ++step) {
    optimizer.zero_grad();
    zoo_loss(model, step, rank).backward();
    optimizer.step();
  }
}

} // namespace

TEST(FullyShardStateDict, LeavesEverythingAsItWas) {
  // R51: a dict that is made before, in the middle of or after a step changes nothing in it.
  on_worlds([](Rank& rank) {
    for (const auto& options : layouts(rank)) {
      Stack ours, quiet;
      auto root = shard_stack(ours, options);
      const auto quiet_root = shard_stack(quiet, options);
      torch::optim::AdamW mine(ours->parameters(), torch::optim::AdamWOptions(0.02));
      torch::optim::AdamW theirs(quiet->parameters(), torch::optim::AdamWOptions(0.02));
      const auto versions = [&] {
        std::vector<uint32_t> all;
        for (const auto& shard : ours->parameters()) all.push_back(shard._version());
        for (size_t i = 0; i < 3; ++i) all.push_back(ours->block(i)->up->weight._version());
        all.push_back(ours->head->weight._version());
        return all;
      };
      const auto freed = [&] {
        std::vector<bool> all;
        for (size_t i = 0; i < 3; ++i) all.push_back(group::is_freed(ours->block(i)->up->weight));
        all.push_back(group::is_freed(ours->head->weight));
        return all;
      };
      const auto save = [&] {
        const auto [versions_before, freed_before, before] = std::tuple(versions(), freed(), root.counters());
        full_state_dict(ours);
        const auto after = root.counters();
        ASSERT_EQ(versions(), versions_before);
        ASSERT_EQ(freed(), freed_before);
        ASSERT_EQ(after.unshards, before.unshards);
        ASSERT_EQ(after.reshards, before.reshards);
        ASSERT_EQ(after.reduce_scatters, before.reduce_scatters);
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
        for (size_t i = 0; i < mine.param_groups()[0].params().size(); ++i) {
          const auto& parameter = mine.param_groups()[0].params()[i];
          const auto& other = theirs.param_groups()[0].params()[i];
          ASSERT_TRUE(torch::equal(parameter, other)) << i;
          ASSERT_TRUE(torch::equal(parameter.grad(), other.grad())) << i;
        }
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

TEST(FullyShardStateDict, OnRank0AndOnTheCpu) {
  on_worlds([](Rank& rank) {
    Zoo ours, reference;
    shard_zoo(ours, rank, sharded_on(rank));
    const auto dict = full_state_dict(ours, FullStateDictOptions().rank0_only(true).cpu_offload(true));
    if (rank.rank() == 0) {
      assert_state(dict, plain_state(*reference), "rank 0");
      for (const auto& item : dict) ASSERT_TRUE(item.value().device().is_cpu());
    } else {
      ASSERT_TRUE(dict.is_empty());
    }
  });
}

TEST(FullyShardStateDict, TiedIgnoredReplicatedWholeAndBuffers) {
  on_worlds([](Rank& rank) {
    for (const auto& options : layouts(rank)) {
      Zoo ours;
      const Zoo reference;
      shard_zoo(ours, rank, options);
      const auto dict = full_state_dict(ours);
      assert_state(dict, plain_state(*reference), "the zoo");
      // As torch's: parameters and buffers of a module, then those of its children.
      const std::vector<std::string> keys{
          "counts",
          "flags",
          "sharded.weight",
          "sharded.bias",
          "norm.weight",
          "norm.bias",
          "norm.running_mean",
          "norm.running_var",
          "norm.num_batches_tracked",
          "copied.weight",
          "copied.bias",
          "fine.weight",
          "fine.bias",
          "ignored.weight",
          "ignored.bias",
          "list.0",
          "plain.weight",
          "again.weight",
          "again.bias"};
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
      train_zoo(ours, rank.rank(), 0);
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
