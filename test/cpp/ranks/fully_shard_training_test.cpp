// The rows of fully_shard_training: what programs see of inputs and parameters, casts, methods, a world of one, and
// microbatches.
#include "group/leaf_storage.h"
#include "ranks/fully_shard_models.h"
#include "ranks/microbatches.h"
#include "ranks/nested_inputs.h"
#include "ranks/sharded_wrappings.h"
#include "ranks/vision_model.h"

namespace shardwise::test {
namespace {

/// A forward without arguments; its data is a plain member.
struct NoInputsImpl : torch::nn::Module {
  NoInputsImpl() {
    fill(*this);
  }
  torch::Tensor forward() {
    return torch::tanh(data.matmul(weight)).matmul(weight);
  }
  torch::Tensor data;
  torch::Tensor weight = register_parameter("weight", torch::empty({4, 4}));
};
TORCH_MODULE(NoInputs);

std::vector<torch::Tensor> members_of(const MlpImpl& mlp) {
  return {mlp.in_proj->weight, mlp.in_proj->bias, mlp.out_proj->weight, mlp.out_proj->bias};
}

using TwoMlps = Pair<torch::nn::Sequential>;

torch::Tensor loss_of_mlps(torch::nn::Sequential& model, int step, int r) {
  return call(model, batch(step, r, model->at<MlpImpl>(0).in_proj->options.in_features())).pow(2).sum();
}

/// parameters() are shards always; members are full, with the right values, or have no memory.
void assert_full(TwoMlps& both, bool of_first, bool of_second, const std::string& what) {
  both.check(what);
  const auto root = unit(*both.ours);
  const auto before = root.counters().unshards;
  for (int i = 0; i < 2; ++i) {
    const auto ours = members_of(both.ours->at<MlpImpl>(i)), theirs = members_of(both.reference->at<MlpImpl>(i));
    for (size_t k = 0; k < ours.size(); ++k) {
      const bool is_full = i == 0 ? of_first : of_second;
      ASSERT_EQ(group::is_freed(ours[k]), !is_full) << what << ", of MLP " << i;
      if (is_full) assert_close(ours[k].detach(), theirs[k].detach(), what);
    }
  }
  ASSERT_EQ(root.counters().unshards, before) << "a look brought nothing";
}

/// Three steps, with each policy of resharding. The first MLP's layers, and the rest, are units, or all of it is one.
void with_two_mlps(
    int64_t width,
    const std::function<void(TwoMlps& both, std::vector<Unit>& units, const Reshard& reshard, int step)>& act) {
  on_ranks([&](Rank& rank) {
    for (const auto& reshard : reshards(rank.world_size())) {
      for (const bool several : {false, true}) {
        auto both = pair(rank, mlps(width, 2), mlps(width, 2));
        // The values of rank 0 are given to all.
        if (rank.rank() > 0) fill(*both.ours, 99);
        const auto wrap = sharding(rank, reshard);
        auto& first = both.ours->at<MlpImpl>(0);
        std::vector<Unit> units;
        if (several) units = {wrap(first.in_proj), wrap(first.out_proj)};
        units.push_back(wrap(both.ours));
        assert_full(both, false, false, "before");
        for (int step = 0; step < 3; ++step) act(both, units, reshard, step);
      }
    }
  });
}

} // namespace

TEST(FullyShardForwardInputs, RootMoveForwardInputToDevice) {
  on_ranks([](Rank& rank) {
    NestedInputs model;
    const auto unit = fully_shard(model, sharded_on(rank));
    assert_inputs_come_through(model, unit, rank);
  });
}

TEST(FullyShardForwardInputs, RootNoForwardInputs) {
  const Program<NoInputs> program{
      [] { return NoInputs(); },
      [](NoInputs& model, int number, int rank) {
        model->data = batch(number, rank, 4, 4).to(model->weight.dtype());
        const auto output = number % 2 == 0 ? model->forward() : call(model);
        EXPECT_EQ(output.sizes(), (std::vector<int64_t>{4, 4}));
        return output.pow(2).sum();
      }};
  const Wrapping<NoInputs> wrapping{[](NoInputs& model, Rank& rank) { fully_shard(model, sharded_on(rank)); }};
  for (const auto& expected : expect_alone(program)) train_twice(expected, wrapping);
}

TEST(FullyShardRegisteredParams, ParamRegistrationAfterForward) {
  with_two_mlps(3, [](TwoMlps& both, std::vector<Unit>& units, const Reshard& reshard, int step) {
    const auto r = both.rank.rank();
    assert_close(loss_of_mlps(both.ours, step, r), loss_of_mlps(both.reference, step, r), "the loss");
    // Unset: the outermost unit keeps its full copies.
    assert_full(both, !frees(reshard, units.size() > 1), !frees(reshard, false), "after forward");
    for (auto& unit : units) unit.reshard();
    assert_full(both, false, false, "resharded");
  });
}

TEST(FullyShardRegisteredParams, ParamRegistrationAfterBackward) {
  with_two_mlps(8, [](TwoMlps& both, std::vector<Unit>&, const Reshard&, int step) {
    both.backward(loss_of_mlps, step);
    assert_full(both, false, false, "after backward");
  });
}

TEST(FullyShardCastAfterInit, ToFloat64AfterInit) {
  const Program<torch::nn::Sequential> program{
      .make = [] { return mlps(4, 2); },
      .loss = [](torch::nn::Sequential& model, int number,
                 int rank) { return model->forward(batch_for(model, number, rank, 4)).pow(2).sum(); },
      .dtype = torch::kDouble};
  train_with_each_reshard(program, [](torch::nn::Sequential& model, const auto& wrap) {
    for (size_t i = 0; i < 2; ++i) wrap(model[i]);
    wrap(model);
    model->to(torch::kDouble);
  });
}

TEST(FullyShardCustomForwardMethod, RegisterFsdpForwardMethod) {
  // In C++ a method needs no registration.
  train_with_each_reshard(vision_program(), [](Vision& model, const auto& wrap) {
    for (size_t i = 0; i < 2; ++i) wrap(model->blocks[i]);
    wrap(model);
  });
}

TEST(FullyShardWorldSize1, TrainParitySingleWorldsize1) {
  for (const auto& widths : kWidths) {
    const Expected<torch::nn::Sequential> expected(mlp_program(widths), 1);
    for (const auto& reshard : reshards(expected.world)) {
      Counters counters;
      const Wrapping<torch::nn::Sequential> wrapping{
          .wrap = [reshard](torch::nn::Sequential& model, Rank& rank) { sharding(rank, reshard)(model); },
          .before = [&](torch::nn::Sequential& model, int) { counters = unit(*model).counters(); },
          .collectives = Collectives()};
      train_twice(expected, wrapping);
      ASSERT_GT(counters.unshards, 0);
      ASSERT_EQ(counters.all_gathers, 0) << "when it was wrapped, too";
      ASSERT_EQ(counters.collective_bytes, 0);
    }
  }
}

namespace {

/// All-gathers a step: four units, each in forward and in backward unless its full copies are there. With `keep_full`,
/// which is told to those whose gradients wait, only where torch's row has a number.
std::optional<int64_t> gathers(const Reshard& reshard_after_forward, Waiting waiting, bool keep_full) {
  if (!keep_full) {
    // Unset: the root's are there in backward.
    const int64_t in_backward = reshard_after_forward ? (reshard_after_forward->frees() ? 4 : 0) : 3;
    return (4 + in_backward) * kMicrobatches;
  }
  if (frees(reshard_after_forward, true) || waiting == Waiting::some_mlps) return std::nullopt;
  return waiting == Waiting::all ? 4 : 4 + 3 * (kMicrobatches - 1);
}

} // namespace

TEST(FullyShardGradientAccumulation, GradientAccumulation) {
  for (const auto& expected : expect_alone(accumulation_program())) {
    for (const auto waiting : kWaiting) {
      AlikeRuns runs;
      for (const auto& reshard : reshards(expected.world)) {
        for (const bool keep_full : {false, true}) {
          SCOPED_TRACE(c10::str(
              "waiting ", static_cast<int>(waiting), ", reshard after forward ",
              reshard ? frees(reshard, true) ? "yes" : "no" : "-", ", keep full ", keep_full));
          Wrapping<torch::nn::Sequential> wrapping{
              .wrap = [=](torch::nn::Sequential& model, Rank& rank) { wrap_mlps(model, sharding(rank, reshard)); },
              .before = [=](torch::nn::Sequential& model, int part) { set_flags(model, part, waiting, keep_full); }};
          const auto all_gathers = gathers(reshard, waiting, keep_full);
          // Those that no table has a number for are compared on two ranks only.
          if (!all_gathers && expected.world > 2) continue;
          if (all_gathers) {
            wrapping.collectives = Collectives{.all_gathers = *all_gathers, .reduce_scatters = reductions(waiting)};
          }
          runs.run(expected, wrapping);
        }
      }
    }
  }
}

TEST(FullyShardGradientAccumulation, 1f1bMicrobatching) {
  for (const auto& expected : expect_alone(pipeline_program())) {
    AlikeRuns runs;
    for (const bool unshard_first : {false, true}) {
      for (const bool keep_full : {false, true}) {
        const Wrapping<Transformer> wrapping{
            .wrap = [](Transformer& model, Rank& rank) { wrap_blocks(model, sharding(rank, false)); },
            .before = [=](Transformer& model, int part) { begin_microbatch(model, part, unshard_first, keep_full); },
            .collectives = Collectives{.all_gathers = keep_full ? 4 : 4 * kMicrobatches, .reduce_scatters = 4}};
        runs.run(expected, wrapping);
      }
    }
  }
}

} // namespace shardwise::test
