// Modules built on the meta device, wrapped there, and given memory for their shards: they train as plain ones.
#include "ranks/state_models.h"

namespace shardwise::test {
namespace {

void assert_on_meta(Stack& model, bool on_meta, const std::string& what) {
  for (const auto& entry : model->named_parameters())
    ASSERT_EQ(entry.value().is_meta(), on_meta) << what << entry.key();
}

/// A model that was wrapped with values, and one that was wrapped without.
struct Twins {
  explicit Twins(const std::function<void(Stack&)>& wrap) {
    wrap(plain);
    wrap(meta);
    to_empty(meta);
    load_full_state_dict(meta, full_state_dict(plain));
  }

  static double step(Stack& model, int number, int rank) {
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02));
    const auto loss = call(model, tokens(number, rank)).pow(2).mean();
    loss.backward();
    const auto norm = clip_grad_norm_(model, 0.5).item<double>();
    optimizer.step();
    return norm + loss.item<double>();
  }

  /// Every bit, since both do the same.
  void train(int rank) {
    for (int number = 0; number < 3; ++number) {
      ASSERT_EQ(step(meta, number, rank), step(plain, number, rank)) << number;
      const auto expected = plain->named_parameters();
      for (const auto& entry : meta->named_parameters()) {
        ASSERT_TRUE(torch::equal(entry.value(), expected[entry.key()])) << entry.key();
        ASSERT_TRUE(torch::equal(entry.value().grad(), expected[entry.key()].grad())) << entry.key();
      }
      meta->zero_grad();
      plain->zero_grad();
    }
  }

  Stack plain;
  Stack meta = stack_on_meta();
};

} // namespace

// Wrapped on the meta device, with optimizers from then; its values come from the reference.
TEST(MetaTraining, ShardsOnOneAxis) {
  on_ranks([](Rank& rank) {
    for (const bool is_tied : {false, true}) {
      for (const bool reshard : {true, false}) {
        const auto make = [&] { return Stack(6, 3, is_tied); };
        auto ours = on_meta(make);
        assert_on_meta(ours, true, "built ");
        shard_stack(ours, sharded_on(rank).reshard_after_forward(reshard));
        assert_on_meta(ours, true, "wrapped ");
        Pair<Stack> both{rank, ours, make()};
        // What only the registry holds stays whole.
        if (is_tied) both.dims = {{"head.weight", -1}};
        both.make_optimizers();
        to_empty(ours);
        assert_on_meta(ours, false, "with memory ");
        ASSERT_EQ(ours->head->weight.is_same(ours->embedding->weight), is_tied);
        load_full_state_dict(ours, full_state_dict(*both.reference));
        both.train(stack_loss);
        assert_state(full_state_dict(ours), plain_state(*both.reference), "the end");
      }
    }
  });
}

TEST(MetaTraining, UnitsOfEveryKindAndBuffers) {
  on_worlds([](Rank& rank) {
    for (const auto& options : layouts(rank)) {
      auto ours = on_meta([] { return Zoo(); });
      Pair<Zoo> both{rank, ours, Zoo()};
      ASSERT_TRUE(ours->norm->running_mean.is_meta() && ours->counts.is_meta());
      ASSERT_TRUE(torch::equal(ours->flags, both.reference->flags)) << "a list of values keeps them";
      shard_zoo(ours, rank, options);
      to_empty(ours);
      load_full_state_dict(ours, full_state_dict(*both.reference));
      both.each([](Zoo& model) { model->eval(); });
      for (int step = 0; step < 3; ++step) {
        both.each([&](Zoo& model) {
          zoo_loss(model, step, 0).backward();
          descend(*model, 0.1);
        });
        assert_state(full_state_dict(ours), plain_state(*both.reference), c10::str("step ", step));
      }
    }
  });
}

TEST(MetaTraining, AsIfItHadValuesWhenItWasWrapped) {
  on_ranks([](Rank& rank) {
    const auto low = MixedPrecision().param_dtype(torch::kBFloat16).reduce_dtype(torch::kFloat);
    const auto sharded = [&](const FullyShardOptions& options) {
      Twins([&](Stack& model) { shard_stack(model, options); }).train(rank.rank());
    };
    sharded(sharded_on(rank).layout(ShardLayout::flat).mixed_precision(low));
    sharded(sharded_on(rank).cpu_offload(CpuOffload()));
    sharded(sharded_on(rank).shard_placement(last_dimension));
    sharded(sharded_on(rank).reshard_after_forward(rank.world_size() / 2));
    Twins([&](Stack& model) {
      const auto options = on(rank).mixed_precision(low);
      for (auto& block : *model->blocks) replicate(*block, options);
      replicate(model, options);
    }).train(rank.rank());
  });
}

TEST(MetaTraining, TheSameTensorsWithTheirHooks) {
  run_ranks(2, [](Rank& rank) {
    for (const bool shards : {true, false}) {
      auto ours = stack_on_meta();
      int called = 0;
      ours->head->weight.register_hook([&](const torch::Tensor&) { ++called; });
      shards ? shard_stack(ours, sharded_on(rank)) : replicate(ours, on(rank));
      const auto before = ours->parameters();
      const auto member = ours->head->weight;
      if (!shards) {
        // A graph of values that never were.
        (void)ours->block(0)->up->forward(batch(0, 0, 6).to(torch::kMeta)).sum();
      }
      to_empty(ours);
      const auto after = ours->parameters();
      for (size_t i = 0; i < after.size(); ++i) ASSERT_TRUE(after[i].is_same(before[i])) << i;
      ASSERT_TRUE(ours->head->weight.is_same(member));
      load_full_state_dict(ours, full_state_dict(*Stack()));
      stack_loss(ours, 0, rank.rank()).backward();
      ASSERT_EQ(called, 1);
      // A second time nothing is left to do.
      const auto values = plain_state(*ours);
      to_empty(ours);
      for (const auto& [name, value] : plain_state(*ours)) ASSERT_TRUE(torch::equal(value, values.at(name))) << name;
    }
  });
}

} // namespace shardwise::test
