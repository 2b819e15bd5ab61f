// The rows of fully_shard_training about microbatches.
#include "ranks/microbatches.h"
#include "ranks/sharded_wrappings.h"

namespace shardwise::test {
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
