#include "base/compute_guard.h"
#include "optim/fused_batch.h"

#include <shardwise/optimizers.h>

#include <ATen/ops/_fused_sgd.h>
#include <c10/core/InferenceMode.h>

namespace shardwise {
namespace {

/// A batch with the momentum of its parameters. Those that get it in this step are in a batch of their own, since the
/// operation begins with the gradient there.
struct Momentum {
  optim::FusedBatch batch;
  std::vector<at::Tensor> buffers;
  bool is_first;
};

using State = torch::optim::SGDParamState;

std::vector<Momentum> momentum_of(const optim::FusedBatches& batches, const optim::FusedBatch& batch) {
  std::vector<Momentum> halves;
  for (const bool is_first : {false, true}) {
    Momentum half{.batch = {batch.group, batch.device, batch.dtype}, .buffers = {}, .is_first = is_first};
    for (size_t i = 0; i < batch.parameters.size(); ++i) {
      const auto& parameter = batch.parameters[i];
      auto& state = batches.state<State, State>(parameter);
      if (state.momentum_buffer().defined() == is_first) continue;
      half.batch.add(parameter, batch.gradients[i], batch.originals[i]);
      half.buffers.push_back(batches.fitting(state.momentum_buffer(), parameter));
    }
    if (!half.buffers.empty()) halves.push_back(std::move(half));
  }
  return halves;
}

/// Whether the device says that the step is to be skipped: a wait, which only a first step needs.
bool is_skipped(const optim::GradientScale& scale) {
  const base::ComputeGuard guard;
  return scale.found_inf.defined() && scale.found_inf.item<float>() != 0;
}

} // namespace

at::Tensor SGD::step(LossClosure closure) {
  auto loss = optim::loss_of(closure);
  const auto given = optim::GradientScale{grad_scale_, found_inf_}.decided();
  if (!given) return loss;
  const c10::InferenceMode no_inference(false);
  const c10::AutoGradMode no_grad(false);
  const auto options_of = [this](size_t group) -> const torch::optim::SGDOptions& {
    return static_cast<const torch::optim::SGDOptions&>(param_groups()[group].options());
  };
  const optim::FusedBatches batches(*this, "SGD");
  std::vector<Momentum> all;
  for (const auto& batch : batches.all()) {
    if (options_of(batch.group).momentum() == 0) {
      all.push_back({.batch = batch, .buffers = {}, .is_first = false});
    } else {
      for (auto& half : momentum_of(batches, batch)) all.push_back(std::move(half));
    }
  }
  for (const auto& [batch, buffers, is_first] : all) {
    if (is_first && is_skipped(*given)) continue;
    const auto scale = given->on(batch.device);
    const auto& options = options_of(batch.group);
    at::_fused_sgd_(
        batch.parameters, batch.gradients, buffers, options.weight_decay(), options.momentum(), options.lr(),
        options.dampening(), options.nesterov(), /*maximize=*/false, is_first, scale.optional_scale(),
        scale.optional_found_inf());
    batch.copy_back(scale);
    for (size_t i = 0; i < buffers.size(); ++i) {
      batches.state<State, State>(batch.parameters[i]).momentum_buffer(buffers[i]);
    }
  }
  return loss;
}

} // namespace shardwise
