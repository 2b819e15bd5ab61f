#include "comm/streams/last_use.h"
#include "optim/counted_state.h"
#include "optim/fused_batch.h"

#include <shardwise/optimizers.h>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

namespace shardwise {
namespace {

/// A batch with the state of its parameters.
template <typename State>
struct Moments {
  optim::FusedBatch batch;
  std::vector<optim::CountedState<State>*> states = {};
  std::vector<at::Tensor> averages = {};
  std::vector<at::Tensor> squares = {};
  /// Empty without amsgrad.
  std::vector<at::Tensor> largest = {};
  std::vector<at::Tensor> counts = {};
};

template <typename State>
Moments<State> moments_of(const optim::FusedBatches& batches, const optim::FusedBatch& batch, bool amsgrad) {
  Moments<State> moments{.batch = batch};
  for (const auto& parameter : batch.parameters) {
    auto& state = batches.state<optim::CountedState<State>, State>(parameter);
    const auto take = [&](at::Tensor& kept, std::vector<at::Tensor>& list) {
      kept = batches.fitting(kept, parameter);
      list.push_back(kept);
    };
    take(state.exp_avg(), moments.averages);
    take(state.exp_avg_sq(), moments.squares);
    if (amsgrad) take(state.max_exp_avg_sq(), moments.largest);
    moments.counts.push_back(state.count_on(batch.device));
    moments.states.push_back(&state);
  }
  return moments;
}

/// `operation`: at::_fused_adam_ or at::_fused_adamw_. Errors are raised before the first parameter changes.
template <typename State, typename Options, typename Operation>
at::Tensor step_fused(
    torch::optim::Optimizer& optimizer, const char* name, const torch::optim::Optimizer::LossClosure& closure,
    const optim::GradientScale& scaled, const Operation& operation) {
  auto loss = optim::loss_of(closure);
  const auto given = scaled.decided();
  if (!given) return loss;
  const c10::InferenceMode no_inference(false);
  const c10::AutoGradMode no_grad(false);
  const auto options_of = [&](size_t group) -> const Options& {
    return static_cast<const Options&>(optimizer.param_groups()[group].options());
  };
  const optim::FusedBatches batches(optimizer, name);
  std::vector<Moments<State>> all;
  for (const auto& batch : batches.all()) {
    all.push_back(moments_of<State>(batches, batch, options_of(batch.group).amsgrad()));
  }
  for (const auto& [batch, states, averages, squares, largest, counts] : all) {
    const auto scale = given->on(batch.device);
    {
      const base::ComputeGuard guard;
      at::_foreach_add_(counts, 1);
    }
    const auto& options = options_of(batch.group);
    const auto [beta1, beta2] = options.betas();
    operation(
        batch.parameters, batch.gradients, averages, squares, largest, counts, options.lr(), beta1, beta2,
        options.weight_decay(), options.eps(), options.amsgrad(), /*maximize=*/false, scale.optional_scale(),
        scale.optional_found_inf());
    batch.copy_back(scale);
    if (scale.found_inf.defined()) {
      const base::ComputeGuard guard;
      at::_foreach_sub_(counts, std::vector<at::Tensor>(counts.size(), scale.found_inf));
    }
    const bool is_captured = comm::is_captured(batch.device);
    for (auto* state : states) state->counted(/*may_skip=*/scale.found_inf.defined(), is_captured);
  }
  return loss;
}

} // namespace

at::Tensor AdamW::step(LossClosure closure) {
  return step_fused<torch::optim::AdamWParamState, torch::optim::AdamWOptions>(
      *this, "AdamW", closure, {grad_scale_, found_inf_},
      [](const auto&... arguments) { at::_fused_adamw_(arguments...); });
}

at::Tensor Adam::step(LossClosure closure) {
  return step_fused<torch::optim::AdamParamState, torch::optim::AdamOptions>(
      *this, "Adam", closure, {grad_scale_, found_inf_},
      [](const auto&... arguments) { at::_fused_adam_(arguments...); });
}

} // namespace shardwise
