// load_full_state_dict(): what it sets is what was saved, in any world, all of it or nothing.
#include "ranks/state_models.h"

namespace shardwise::test {

TEST(FullyShardStateDictLoad, RoundTripThroughOtherWorldsAndAPlainModule) {
  // R51, row 24: values are all different; the optimizer's next steps are those of one process.
  Stack reference;
  auto saved = full_state_dict(reference);
  int step = 0;
  for (const int world : {3, 4, 1, 2}) {
    for (const bool flat : {false, true}) {
      const auto layout = flat ? ShardLayout::flat : ShardLayout::rows;
      const auto before = plain_state(*reference);
      StateDict next;
      run_ranks(world, [&](Rank& rank) {
        Stack ours;
        const torch::NoGradGuard guard;
        for (auto& parameter : ours->parameters()) parameter.fill_(17);
        shard_stack(ours, sharded_on(rank).layout(layout));
        const auto loaded = load_full_state_dict(ours, rank.rank() == 0 ? saved : StateDict());
        int64_t elements = 0;
        for (const auto& item : saved) elements += item.value().numel();
        ASSERT_EQ(loaded.elements, elements) << "R52";
        assert_state(full_state_dict(ours), before, "loaded");
        torch::optim::AdamW mine(ours->parameters(), torch::optim::AdamWOptions(0.02));
        for (int i = 0; i < 3; ++i) {
          const c10::AutoGradMode with_grad(true);
          mine.zero_grad();
          stack_loss(ours, step + i, rank.rank()).backward();
          mine.step();
        }
        const auto dict = full_state_dict(ours);
        if (rank.rank() == 0) next = dict;
      });
      torch::optim::AdamW fresh(reference->parameters(), torch::optim::AdamWOptions(0.02));
      for (int i = 0; i < 3; ++i, ++step) {
        fresh.zero_grad();
        for (int r = 0; r < world; ++r) (stack_loss(reference, step, r) / world).backward();
        fresh.step();
      }
      saved = std::move(next);
      assert_state(saved, plain_state(*reference), c10::str("world ", world));
      // Rounding differs, so that the two would part in the course of steps.
      load_full_state_dict(reference, saved);
      Stack plain;
      load_full_state_dict(plain, saved);
      assert_state(saved, plain_state(*plain), "the plain module");
    }
  }
}

TEST(FullyShardStateDictLoad, LoadSetsEveryKindOnAllRanks) {
  // R64: buffers too, by name.
  on_worlds([](Rank& rank) {
    for (const bool broadcast : {true, false}) {
      for (const auto& options : layouts(rank)) {
        Zoo source, ours;
        {
          const torch::NoGradGuard guard;
          fill(*source, 99);
          source->norm->running_mean.copy_(torch::randn({5}, generator(4)));
          source->norm->num_batches_tracked.fill_(12);
          source->counts.mul_(3);
          source->flags.logical_not_();
          // What no unit has differs between the ranks before.
          ours->plain->weight.fill_(rank.rank());
        }
        shard_zoo(ours, rank, options);
        const auto shards = ours->parameters();
        const auto member = ours->sharded->weight;
        const auto mine = !broadcast || rank.rank() == 0 ? full_state_dict(source) : StateDict();
        const auto loaded = load_full_state_dict(ours, mine, LoadStateDictOptions().broadcast_from_rank0(broadcast));
        ASSERT_TRUE(loaded.missing.empty());
        ASSERT_TRUE(loaded.unexpected.empty());
        assert_state(full_state_dict(ours), plain_state(*source), "loaded");
        for (size_t i = 0; i < shards.size(); ++i) {
          ASSERT_TRUE(ours->parameters()[i].is_same(shards[i]));
          ASSERT_TRUE(shards[i].requires_grad() && shards[i].is_leaf());
        }
        ASSERT_TRUE(ours->sharded->weight.is_same(member));
        assert_close(ours->forward(batch(0, 1, 4)), source->forward(batch(0, 1, 4)), "forward");
      }
    }
  });
}

TEST(FullyShardStateDictLoad, LoadMakesKeptCopiesStale) {
  // R51: after a load the next forward, and a backward under way, use the new values.
  on_worlds([](Rank& rank) {
    for (const auto& options : layouts(rank)) {
      Stack ours, reference, other;
      fill(*other, 1234);
      auto root = shard_stack(ours, FullyShardOptions(options).reshard_after_forward(false));
      root.set_reshard_after_backward(false);
      torch::optim::AdamW mine(ours->parameters(), torch::optim::AdamWOptions(0.02));
      const auto load_other = [&] {
        load_full_state_dict(ours, rank.rank() == 0 ? full_state_dict(other) : StateDict());
      };
      for (int step = 0; step < 3; ++step) {
        stack_loss(ours, step, rank.rank()).backward();
        ASSERT_FALSE(group::is_freed(ours->block(0)->up->weight));
        mine.step();
        mine.zero_grad();
        {
          const torch::NoGradGuard guard;
          ours->forward(tokens(step, 1));
        }
        const auto version = ours->parameters()[0]._version();
        load_other();
        ASSERT_GT(ours->parameters()[0]._version(), version);
        ASSERT_EQ(ours->head->weight.grad().defined(), false);
        assert_close(ours->forward(tokens(step, 2)), other->forward(tokens(step, 2)), "after the load");
      }
      auto output = ours->head->forward(torch::ones({1, 6}).requires_grad_());
      output.sum().backward();
      mine.zero_grad();
      load_full_state_dict(ours, full_state_dict(reference));
      auto input = torch::ones({1, 6}).requires_grad_();
      output = ours->head->forward(input);
      load_other();
      output.sum().backward();
      assert_close(input.grad().flatten(), other->head->weight.detach().sum(0), "a backward after the load");
    }
  });
}

TEST(FullyShardStateDictLoad, WhatDoesNotFitIsToldOnAllRanksAndChangesNothing) {
  on_worlds([](Rank& rank) {
    Stack ours, reference;
    shard_stack(ours, sharded_on(rank));
    const Stack source;
    const auto other = [&] {
      const torch::NoGradGuard guard;
      StateDict dict;
      for (const auto& item : full_state_dict(*source)) dict.insert(item.key(), item.value() + 1);
      return dict;
    };
    const auto load = [&](const StateDict& dict, bool strict = true) {
      return load_full_state_dict(ours, rank.rank() == 0 ? dict : StateDict(), LoadStateDictOptions().strict(strict));
    };
    auto less = other();
    less.erase("blocks.1.up.bias");
    less.insert("blocks.7.up.bias", torch::ones({2}));
    auto shapes = other();
    shapes["head.weight"] = torch::ones({11, 7});
    shapes["blocks.0.norm.weight"] = torch::ones({6}, torch::kDouble);
    shapes["blocks.2.norm.bias"] = torch::Tensor();
    const std::vector<std::string> wrong{
        "'head.weight' has shape [11, 6] here and [11, 7] in the dict",
        "'blocks.0.norm.weight' is float32 here and float64 in the dict", "'blocks.2.norm.bias' is undefined"};
    const std::vector<std::string> names{
        "missing in the dict: blocks.1.up.bias", "not in the module: blocks.7.up.bias", "strict(false)", "rank 0"};
    expect_error<Error>([&] { load(less); }, names);
    expect_error<Error>([&] { load(shapes); }, wrong);
    expect_error<Error>([&] { load(shapes, /*strict=*/false); }, wrong);
    expect_error<Error>(
        [&] { load(StateDict()); }, {"missing in the dict: embedding.weight, blocks.0", "nothing was loaded"});
    // One rank of those that bring their own.
    const auto own = LoadStateDictOptions().broadcast_from_rank0(false);
    expect_error<Error>(
        [&] { load_full_state_dict(ours, rank.rank() == 1 ? less : other(), own); }, {"of rank 1", names[0], names[1]});
    // A full copy that is not there.
    auto freed = other();
    freed["head.weight"] = ours->head->weight;
    expect_error<Error>([&] { load(freed); }, {"'head.weight' is the full copy", "freed"});
    assert_state(full_state_dict(ours), plain_state(*reference), "nothing changed");
    Pair<Stack> both{rank, ours, reference};
    both.train(stack_loss, 3);

    const auto loaded = load(less, /*strict=*/false);
    ASSERT_EQ(loaded.missing, std::vector<std::string>{"blocks.1.up.bias"});
    ASSERT_EQ(loaded.unexpected, std::vector<std::string>{"blocks.7.up.bias"});
    auto expected = plain_state(*source);
    for (auto& [name, value] : expected) value += 1;
    expected["blocks.1.up.bias"] = reference->block(1)->up->bias.detach();
    assert_state(full_state_dict(ours), expected, "what fits");
    const auto nothing = load(StateDict(), /*strict=*/false);
    ASSERT_EQ(nothing.elements, 0);
    ASSERT_EQ(nothing.missing.size(), expected.size());
    assert_state(full_state_dict(ours), expected, "nothing fits");
  });
}

TEST(FullyShardStateDictLoad, TiedNames) {
  run_ranks(2, [](Rank& rank) {
    Zoo ours, reference;
    shard_zoo(ours, rank, sharded_on(rank));
    const auto value = torch::randn({5, 4}, generator(8));
    for (const std::string gone : {"again.weight", "sharded.weight", ""}) {
      auto dict = full_state_dict(reference);
      if (!gone.empty()) dict.erase(gone);
      const auto kept = gone == "again.weight" ? "sharded.weight" : "again.weight";
      dict[kept] = value + static_cast<double>(gone.size());
      const auto loaded = load_full_state_dict(ours, dict);
      ASSERT_TRUE(loaded.missing.empty());
      assert_close(full_state_dict(ours)["sharded.weight"], dict[kept], gone);
    }
    auto neither = full_state_dict(reference);
    neither.erase("again.weight");
    neither.erase("sharded.weight");
    expect_error<Error>(
        [&] { load_full_state_dict(ours, neither); }, {"missing in the dict: sharded.weight, again.weight\n"});
  });
}

TEST(FullyShardStateDictLoad, UnitsOnSeveralMeshes) {
  run_ranks(4, [](Rank& rank) {
    auto both = rank.mesh({{"a", 2}, {"b", 2}});
    const auto along = [&](const std::string& axis) {
      return Mesh::from_process_groups({axis}, {both.group(axis)}, rank.device());
    };
    Stack ours, reference;
    fully_shard(ours->block(0), FullyShardOptions().mesh(along("a")));
    fully_shard(ours->block(1), FullyShardOptions().mesh(along("b")));
    const auto dict = full_state_dict(ours, FullStateDictOptions().rank0_only(true));
    ASSERT_EQ(dict.is_empty(), rank.rank() != 0);
    assert_state(full_state_dict(ours), plain_state(*reference), "two meshes");
    Stack other;
    fill(*other, 55);
    expect_error<ValueError>(
        [&] { load_full_state_dict(ours, full_state_dict(other)); }, {"2 meshes", "broadcast_from_rank0(false)"});
    load_full_state_dict(ours, full_state_dict(other), LoadStateDictOptions().broadcast_from_rank0(false));
    assert_state(full_state_dict(ours), plain_state(*other), "loaded");
    // What is wrong on one rank reaches the ranks that only a second mesh ties to it.
    const auto shard = ours->block(0)->parameters()[0];
    if (rank.rank() == 3) shard.set_data(torch::ones({1}));
    expect_error<Error>([&] { full_state_dict(ours); }, {"was replaced"});
  });
}

} // namespace shardwise::test
