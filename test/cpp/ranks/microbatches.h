#pragma once

// Programs of three microbatches a step, for the rows of gradient accumulation.
#include "ranks/training_models.h"
#include "ranks/transformer_model.h"

namespace shardwise::test {

constexpr int kMicrobatches = 3;

/// A linear layer, which is the root's, and three MLPs, which are units.
inline Program<torch::nn::Sequential> accumulation_program() {
  return {
      [] { return mlps(32, 3, /*linear_first=*/true); },
      [](torch::nn::Sequential& model, int number, int rank) {
        return call(model, batch_for(model, number, rank, 32)).pow(2).mean();
      },
      by_form(3, 5), kMicrobatches};
}

template <typename Wrap>
void wrap_mlps(torch::nn::Sequential& model, const Wrap& wrap) {
  for (size_t i = 1; i < 4; ++i) wrap(model[i]);
  wrap(model);
}

/// Whose gradients are not averaged before the last microbatch: of all units, of two of the MLPs, or of the root's own.
enum class Waiting { all, some_mlps, root_only };
inline const std::vector<Waiting> kWaiting{Waiting::all, Waiting::some_mlps, Waiting::root_only};

/// Reductions a step: a unit has one for each microbatch that it averages.
inline int64_t reductions(Waiting waiting) {
  const int64_t at_each = waiting == Waiting::all ? 0 : waiting == Waiting::some_mlps ? 2 : 3;
  return 4 + at_each * (kMicrobatches - 1);
}

/// Before the forward of a microbatch. With `keep_full` those units keep full copies until the last one, too.
inline void set_flags(torch::nn::Sequential& model, int microbatch, Waiting waiting, bool keep_full) {
  const bool last = microbatch == kMicrobatches - 1;
  const auto set = [&](Unit unit, bool recurse) {
    unit.set_requires_gradient_sync(last, recurse);
    if (keep_full) unit.set_reshard_after_backward(last, recurse);
  };
  if (waiting == Waiting::some_mlps) {
    for (size_t i : {1, 2}) set(unit(*model[i]), true);
  } else {
    set(unit(*model), waiting == Waiting::all);
  }
}

/// Four steps of three microbatches of text, for 1F1B.
inline auto pipeline_program() {
  auto program = text_program();
  program.steps = 4;
  program.parts = kMicrobatches;
  return program;
}

/// As a pipeline stage of 1F1B does: gradients are averaged at the last microbatch, full copies may be brought first by
/// hand, and may stay until the last.
inline void begin_microbatch(Transformer& model, int microbatch, bool unshard_first, bool keep_full) {
  const bool last = microbatch == kMicrobatches - 1;
  auto root = unit(*model);
  if (unshard_first && microbatch == 0) {
    for (size_t i = 0; i < model->blocks->size(); ++i) unit(*model->block(i)).unshard(/*async=*/true);
    root.unshard(/*async=*/true);
  }
  root.set_requires_gradient_sync(last);
  root.set_is_last_backward(last);
  if (keep_full) root.set_reshard_after_backward(last);
}

} // namespace shardwise::test
