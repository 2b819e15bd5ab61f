// The rows of fully_shard_training about checkpoints and shared parameters.
#include "ranks/sharded_wrappings.h"
#include "ranks/transformer_model.h"

namespace shardwise::test {
namespace {

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

/// `wrap` is called with the model and what makes units.
template <typename Wrap>
std::vector<Wrapping<Transformer>> with_each(const std::vector<Reshard>& reshards, const Wrap& wrap) {
  std::vector<Wrapping<Transformer>> wrappings;
  for (const auto& reshard : reshards) {
    wrappings.push_back({[=](Transformer& model, Rank& rank) { wrap(model, sharding(rank, reshard)); }});
  }
  return wrappings;
}

/// Every linear layer and every norm of the blocks, then the blocks, then the rest.
void wrap_layer_by_layer(Transformer& model, Rank& rank) {
  const auto wrap = sharding(rank, std::nullopt);
  wrap(Modules{model->tokens.ptr(), model->head.ptr()});
  for (size_t i = 0; i < model->blocks->size(); ++i) {
    auto block = model->block(i);
    wrap(block->attention->mix);
    wrap(block->attention->out);
    wrap(block->norm_1);
    wrap(block->up);
    wrap(block);
  }
  wrap(model);
}

} // namespace

TEST(FullyShard1DTrainingCompose, TrainParityWithActivationCheckpointing) {
  for (const auto grouping : {Grouping::block, Grouping::pairs, Grouping::tied}) {
    const bool tied = grouping == Grouping::tied;
    train_checkpointed(
        text_program({.tied = tied}), {.tied = tied}, {Checkpointing::around, Checkpointing::inside},
        with_each({true, false}, [=](Transformer& model, const auto& wrap) { wrap_groups(model, grouping, wrap); }));
  }
}

TEST(FullyShard1DTrainingCompose, DoubleForwardWithNestedFsdpAndCheckpoint) {
  const auto wrap_nested = [](Transformer& model, const auto& wrap) {
    for (size_t i = 0; i < model->blocks->size(); ++i) {
      auto block = model->block(i);
      wrap(block->attention);
      wrap(Modules{block->up.ptr(), block->down.ptr()});
      wrap(block);
    }
    wrap(model);
  };
  auto program = text_program({.depth = 2});
  program.steps = 4;
  program.loss = [](Transformer& model, int number, int rank) {
    const auto first = text_loss(model, 2 * number, rank);
    return first + text_loss(model, 2 * number + 1, rank) * first;
  };
  const Expected<Transformer> alone(program, 1);
  for (const auto& [name, gradient] : alone.single.front().gradients) ASSERT_TRUE(gradient.defined()) << name;
  train_checkpointed(
      program, {.depth = 2}, {Checkpointing::around, Checkpointing::inside},
      with_each(reshards(kSecondWorld), wrap_nested));
}

TEST(FullyShardSharedParams, TrainParityWithSharedParams) {
  train_checkpointed(
      text_program({.tied = true}), {.tied = true}, {Checkpointing::around, Checkpointing::none},
      with_each(reshards(kSecondWorld), [](Transformer& model, const auto& wrap) { wrap_blocks(model, wrap); }));
}

TEST(FullyShardSharedParams, TrainSharedParamsUnevenShard) {
  for (const int world : {2, 4}) {
    const Expected<Transformer> expected(text_program({.vocabulary = 4 * world + 1, .tied = true}), world);
    std::vector<int64_t> rows(world);
    run_ranks(world, [&](Rank& rank) {
      Transformer ours(nullptr);
      torch::Tensor before;
      const Wrapping<Transformer> wrapping{[&](Transformer& model, Rank& rank) {
        wrap_groups(model, Grouping::tied, sharding(rank, std::nullopt));
        ours = model;
        before = model->named_parameters()["tokens.weight"].detach().clone();
      }};
      Trace trace;
      train(rank, expected, wrapping, trace);
      const auto parameters = ours->named_parameters();
      const auto shard = parameters["tokens.weight"];
      ASSERT_TRUE(shard.is_same(parameters["head.weight"]));
      ASSERT_TRUE((shard != before).any(1).all().item<bool>()) << "a row that did not move on " << rank.name();
      rows[rank.rank()] = shard.size(0);
    });
    ASSERT_EQ(rows, world == 2 ? (std::vector<int64_t>{5, 4}) : (std::vector<int64_t>{5, 5, 5, 2}));
  }
}

TEST(FullyShardSharedParams, SharedParamsSeparateFsdpGroupsError) {
  run_ranks(2, [](Rank& rank) {
    const auto options = sharded_on(rank);
    const auto refused = [&](auto module, const std::string& names) {
      const auto wrap = [&] { fully_shard(module, options); };
      expect_error<ValueError>(wrap, {names, "already managed by another unit", "must be in one unit"});
    };
    const auto tied = [&] {
      Transformer model(TransformerSettings{.tied = true});
      fully_shard(model->tokens, options);
      return model;
    };
    refused(tied()->head, "'weight' is shared with 'weight'");
    refused(Modules{tied()->head.ptr()}, "'weight' is shared with 'weight'");
    refused(tied(), "'head.weight' is shared with 'tokens.weight'");
    // In one call, or only with the module around both, they are one parameter.
    Transformer together(TransformerSettings{.tied = true});
    fully_shard(Modules{together->tokens.ptr(), together->head.ptr()}, options);
    fully_shard(together, options);
    fully_shard(Transformer(TransformerSettings{.tied = true}), options);
  });
}

TEST(FullyShardSharedParams, LayerByLayerShardNoFalsePositive) {
  // Also a second model of the same names and shapes beside it, and one that is not tied.
  for (const bool tied : {true, false}) {
    const Wrapping<Transformer> wrapping{[tied](Transformer& model, Rank& rank) {
      Transformer other(TransformerSettings{.tied = tied});
      wrap_layer_by_layer(other, rank);
      wrap_layer_by_layer(model, rank);
    }};
    auto program = text_program({.tied = tied});
    program.steps = 4;
    for (const auto& expected : expect_alone(program)) train_on_ranks(expected, wrapping);
  }
}

} // namespace shardwise::test
