// Modules built on the meta device, wrapped there, and given memory for their shards: they train as plain ones.
#include "ranks/state_models.h"

namespace shardwise::test {
namespace {

void assert_on_meta(Stack& model, bool on_meta, const std::string& what) {
  for (const auto& entry : model->named_parameters())
    ASSERT_EQ(entry.value().is_meta(), on_meta) << what << entry.key();
}

} // namespace

// Wrapped on the meta device, with optimizers and hooks from then; its values come from the reference.
TEST(MetaTraining, ShardsOnOneAxis) {
  on_ranks([](Rank& rank) {
    for (const bool is_tied : {false, true}) {
      for (const bool reshard : {true, false}) {
        const auto make = [&] { return Stack(6, 3, is_tied); };
        auto ours = on_meta(make);
        assert_on_meta(ours, true, "built ");
        int called = 0;
        ours->head->weight.register_hook([&](const torch::Tensor&) { ++called; });
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
        to_empty(ours); // nothing is left to do
        both.train(stack_loss, 4);
        ASSERT_EQ(called, 4);
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

// Every bit, since both do the same.
TEST(MetaTraining, AsIfItHadValuesWhenItWasWrapped) {
  on_ranks([](Rank& rank) {
    const auto train = [&](const std::function<void(Stack&)>& wrap) {
      Stack plain, meta = stack_on_meta();
      for (auto* model : {&plain, &meta}) wrap(*model);
      to_empty(meta);
      load_full_state_dict(meta, full_state_dict(plain));
      for (int step = 0; step < 3; ++step) {
        for (auto* model : {&plain, &meta}) {
          (*model)->zero_grad();
          call(*model, tokens(step, rank.rank())).pow(2).mean().backward();
          clip_grad_norm_(*model, 0.5);
          torch::optim::AdamW((*model)->parameters(), torch::optim::AdamWOptions(0.02)).step();
        }
        assert_same(*meta, *plain, c10::str("step ", step), assert_equal);
      }
    };
    const auto low = MixedPrecision().param_dtype(torch::kBFloat16).reduce_dtype(torch::kFloat);
    const auto sharded = [&](const FullyShardOptions& options) {
      train([&](Stack& model) { shard_stack(model, options); });
    };
    sharded(sharded_on(rank).layout(ShardLayout::flat).mixed_precision(low));
    sharded(sharded_on(rank).cpu_offload(CpuOffload()));
    sharded(sharded_on(rank).shard_placement(last_dimension));
    sharded(sharded_on(rank).reshard_after_forward(rank.world_size() / 2));
    train([&](Stack& model) {
      const auto options = on(rank).mixed_precision(low);
      for (auto& block : *model->blocks) replicate(*block, options);
      replicate(model, options);
    });
  });
}

} // namespace shardwise::test
