// The rows of replicate_training about checkpoints, shared parameters, microbatches and methods.
#include "ranks/microbatches.h"
#include "ranks/vision_model.h"

namespace shardwise::test {
namespace {

/// For wrap_blocks() and its like.
auto replicating(Rank& rank) {
  return [&rank](auto modules) { return replicate(modules, on(rank)); };
}

} // namespace

TEST(ReplicateTrainingCompose, TrainParityWithActivationCheckpointing) {
  for (const auto grouping : {Grouping::block, Grouping::pairs, Grouping::tied}) {
    const Wrapping<Transformer> wrapping{
        [grouping](Transformer& model, Rank& rank) { wrap_groups(model, grouping, replicating(rank)); }, whole};
    const auto tied = grouping == Grouping::tied;
    train_checkpointed(
        text_program({.tied = tied}), {.tied = tied}, {Checkpointing::around, Checkpointing::inside}, {wrapping});
  }
}

TEST(ReplicateSharedParams, TrainParityWithSharedParams) {
  const Wrapping<Transformer> wrapping{
      [](Transformer& model, Rank& rank) { wrap_blocks(model, replicating(rank)); }, whole};
  train_checkpointed(
      text_program({.tied = true}), {.tied = true}, {Checkpointing::around, Checkpointing::none}, {wrapping});
}

TEST(ReplicateGradientAccumulation, GradientAccumulation) {
  for (const auto& expected : expect_alone(accumulation_program())) {
    for (const auto waiting : kWaiting) {
      const Wrapping<torch::nn::Sequential> wrapping{
          .wrap = [](torch::nn::Sequential& model, Rank& rank) { wrap_mlps(model, replicating(rank)); },
          .dim = whole,
          .before = [=](torch::nn::Sequential& model, int part) { set_flags(model, part, waiting, false); },
          .collectives = Collectives{.all_reduces = reductions(waiting)}};
      train_twice(expected, wrapping);
    }
  }
}

TEST(ReplicateGradientAccumulation, 1f1bMicrobatching) {
  for (const auto& expected : expect_alone(pipeline_program())) {
    AlikeRuns runs;
    for (const bool unshard_first : {false, true}) {
      for (const bool keep_full : {false, true}) {
        const Wrapping<Transformer> wrapping{
            .wrap = [](Transformer& model, Rank& rank) { wrap_blocks(model, replicating(rank)); },
            .dim = whole,
            .before = [=](Transformer& model, int part) { begin_microbatch(model, part, unshard_first, keep_full); },
            .collectives = Collectives{.all_reduces = 4}};
        runs.run(expected, wrapping);
      }
    }
  }
}

TEST(ReplicateCustomForwardMethod, RegisterFsdpForwardMethod) {
  // In C++ a method needs no registration.
  const Wrapping<Vision> wrapping{
      [](Vision& model, Rank& rank) {
        for (const auto& block : *model->blocks) replicate(*block, on(rank));
        replicate(model, on(rank));
      },
      whole};
  for (const auto& expected : expect_alone(vision_program())) train_twice(expected, wrapping);
}

} // namespace shardwise::test
