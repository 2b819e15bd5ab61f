// The rows of replicate_training: programs that are trained with replicate(), and what they see of their parameters.
#include "ranks/microbatches.h"
#include "ranks/nested_inputs.h"
#include "ranks/vision_model.h"

namespace shardwise::test {
namespace {

const std::vector<StepPoint> kReplicatePoints{StepPoint::reduce, StepPoint::reduced, StepPoint::publish};

/// For wrap_blocks() and its like.
auto replicating(Rank& rank) {
  return [&rank](auto modules) { return replicate(modules, on(rank)); };
}

template <typename Model>
Wrapping<Model> as_one_unit() {
  return {[](Model& model, Rank& rank) { replicate(model, on(rank)); }, whole};
}

/// Each of its modules, and the rest.
Wrapping<torch::nn::Sequential> by_child() {
  return {
      [](torch::nn::Sequential& model, Rank& rank) {
        for (const auto& child : model->children()) replicate(*child, on(rank));
        replicate(model, on(rank));
      },
      whole};
}

Wrapping<Transformer> by_block() {
  return {[](Transformer& model, Rank& rank) { wrap_blocks(model, replicating(rank)); }, whole};
}

/// The first MLP's layers, and the rest, are units, or all of it is one.
Unit wrap_two_mlps(torch::nn::Sequential& model, Rank& rank, bool several) {
  // The values of rank 0 are given to all.
  if (rank.rank() > 0) fill(*model, 99);
  if (several) {
    auto& first = model->at<MlpImpl>(0);
    replicate(first.in_proj, on(rank));
    replicate(first.out_proj, on(rank));
  }
  return replicate(model, on(rank));
}

torch::Tensor mlps_loss(torch::nn::Sequential& model, int number, int rank) {
  const auto width = (*model->begin()).ptr<MlpImpl>()->in_proj->options.in_features();
  return model->forward(batch_for(model, number, rank, width)).pow(2).sum();
}

/// What parameters() gives and what the members are is one tensor, whole, with the values of the reference.
void assert_registered(torch::nn::Sequential& model, torch::nn::Sequential& reference) {
  assert_same(*model, *reference, "registered");
  for (int i = 0; i < 2; ++i) {
    auto& mlp = model->at<MlpImpl>(i);
    const std::vector<torch::Tensor> members{
        mlp.in_proj->weight, mlp.in_proj->bias, mlp.out_proj->weight, mlp.out_proj->bias};
    const auto registered = mlp.parameters();
    for (size_t k = 0; k < members.size(); ++k) ASSERT_TRUE(members[k].is_same(registered[k]));
  }
}

} // namespace

TEST(ReplicateForwardInputs, RootMoveForwardInputToDevice) {
  on_ranks([](Rank& rank) {
    NestedInputs model;
    const auto unit = replicate(model, on(rank));
    assert_inputs_come_through(model, unit, rank);
  });
}

TEST(ReplicateRegisteredParams, ParamRegistrationAfterForward) {
  // A replicated parameter is one tensor for life, where torch swaps a sharded form and a full one.
  on_ranks([](Rank& rank) {
    for (const bool several : {false, true}) {
      auto model = mlps(3, 2);
      auto reference = mlps(3, 2);
      auto root = wrap_two_mlps(model, rank, several);
      const auto before = root.counters();
      assert_registered(model, reference);
      for (int step = 0; step < 3; ++step) {
        assert_close(mlps_loss(model, step, rank.rank()), mlps_loss(reference, step, rank.rank()), "loss");
        assert_registered(model, reference);
        root.reshard();
        assert_registered(model, reference);
      }
      ASSERT_EQ(root.counters().collective_bytes, before.collective_bytes);
    }
  });
}

TEST(ReplicateRegisteredParams, ParamRegistrationAfterBackward) {
  on_ranks([](Rank& rank) {
    for (const bool several : {false, true}) {
      auto model = mlps(8, 2);
      auto reference = mlps(8, 2);
      const auto root = wrap_two_mlps(model, rank, several);
      assert_registered(model, reference);
      for (int step = 0; step < 3; ++step) {
        mlps_loss(model, step, rank.rank()).backward();
        reference_backward(rank, [&](int r) { return mlps_loss(reference, step, r); });
        assert_registered(model, reference);
      }
      ASSERT_EQ(root.counters().all_reduces, several ? 9 : 3);
    }
  });
}

TEST(ReplicateCastAfterInit, ToFloat64AfterInit) {
  const Program<torch::nn::Sequential> program{
      .make = [] { return mlps(4, 2); }, .loss = mlps_loss, .dtype = torch::kDouble};
  auto wrapping = by_child();
  wrapping.wrap = [wrap = wrapping.wrap](torch::nn::Sequential& model, Rank& rank) {
    wrap(model, rank);
    model->to(torch::kDouble);
  };
  for (const auto& expected : expect_alone(program)) train_twice(expected, wrapping);
}

TEST(Replicate1DTrainingCore, TrainParitySingleGroup) {
  for (const auto& widths : kWidths) {
    for (const auto& expected : expect_alone(mlp_program(widths))) {
      train_twice(expected, as_one_unit<torch::nn::Sequential>());
    }
  }
}

TEST(Replicate1DTrainingCore, TrainParityMultiGroups) {
  for (const auto& expected : expect_alone(text_program())) {
    AlikeRuns runs;
    runs.run(expected, by_block());
    runs.run_late(expected, by_block(), kReplicatePoints);
  }
}

TEST(Replicate1DTrainingCore, TrainParityMultiGroupCpuOffloadEager) {
  // On a mesh of CPUs nothing is moved: what there is to see is that all of it is where it should be.
  for (const auto& expected : expect_alone(text_program())) {
    AlikeRuns runs;
    for (const bool pin : {true, false}) {
      const Wrapping<Transformer> wrapping{
          [=](Transformer& model, Rank& rank) {
            const auto options = on(rank).cpu_offload(CpuOffload().pin_memory(pin));
            wrap_blocks(model, [&](auto part) { replicate(part, options); });
          },
          whole,
          /*shards=*/0, [](Transformer& model, int) { assert_on_the_host(*model); }};
      runs.run_late(expected, wrapping, {StepPoint::reduce});
    }
  }
}

TEST(Replicate1DTrainingCore, NonRootForwardBackward) {
  for (const auto& expected : expect_alone(non_root_program())) train_twice(expected, by_child());
}

TEST(Replicate1DTrainingCore, MultiForwardModule) {
  const Wrapping<Twice> wrapping{
      [](Twice& model, Rank& rank) {
        replicate(model->inner, on(rank));
        replicate(model, on(rank));
      },
      whole};
  for (const auto& expected : expect_alone(twice_program())) train_twice(expected, wrapping);
}

TEST(Replicate1DTrainingCore, ExplicitPrefetching) {
  // Accepted, and without effect: nothing is ever gathered.
  auto wrapping = by_block();
  wrapping.wrap = [](Transformer& model, Rank& rank) {
    wrap_blocks(model, replicating(rank));
    prefetch_two_blocks(model);
  };
  wrapping.collectives = Collectives{.all_reduces = 9};
  for (const auto& expected : expect_alone(text_program({.depth = 8}))) train_twice(expected, wrapping);
}

TEST(Replicate1DTrainingCore, PostOptimEvent) {
  auto wrapping = by_block();
  wrapping.before = set_optimizer_event<Transformer>;
  for (const auto& expected : expect_alone(text_program())) train_twice(expected, wrapping);
}

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
  train_checkpointed(
      text_program({.tied = true}), {.tied = true}, {Checkpointing::around, Checkpointing::none}, {by_block()});
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
        auto wrapping = by_block();
        wrapping.before = [=](Transformer& model, int part) {
          begin_microbatch(model, part, unshard_first, keep_full);
        };
        wrapping.collectives = Collectives{.all_reduces = 4};
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
