#pragma once

#include <shardwise/detail/export.h>
#include <shardwise/state_dict.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <optional>
#include <unordered_map>

namespace shardwise {

namespace detail {

/// What a GradScaler knows of an optimizer between two updates.
struct ScalerProgress {
  enum class Stage : uint8_t { ready, unscaled, stepped };

  Stage stage = Stage::ready;
  /// One if something is not finite on any rank, else zero; undefined before that is known.
  at::Tensor found_inf;
};

} // namespace detail

/// The options of GradScaler: those of torch.amp.GradScaler. Everything has a default.
struct SHARDWISE_API GradScalerOptions {
  /// The scale of the first step.
  TORCH_ARG(double, init_scale) = 65536;
  /// Multiplies the scale after `growth_interval` steps in a row with finite gradients; above 1.
  TORCH_ARG(double, growth_factor) = 2;
  /// Multiplies the scale after a step whose gradients are not finite; below 1.
  TORCH_ARG(double, backoff_factor) = 0.5;
  /// How many steps in a row need finite gradients before the scale grows; at least 1.
  TORCH_ARG(int64_t, growth_interval) = 2000;
  /// If not, nothing is scaled, and step() is the optimizer's.
  TORCH_ARG(bool, enabled) = true;
};

/// Scales losses, so that small gradients in half precision do not become zero, and skips steps whose gradients are not
/// finite: torch.amp.GradScaler for C++, for wrapped modules and others.
///
///   shardwise::GradScaler scaler;
///   scaler.scale(loss).backward();
///   scaler.unscale_(optimizer);                    // only to read or clip gradients
///   shardwise::clip_grad_norm_(model, 1.0);
///   scaler.step(optimizer);
///   scaler.update();
///
/// If a gradient is not finite on one rank, all ranks skip the step and change their scale alike. That takes one
/// all-reduce of one number for each mesh on which the optimizer's parameters have shards. All ranks must make the same
/// calls with optimizers of the same parameters.
///
/// With AdamW, Adam and SGD of shardwise a device decides by itself, and the host waits only for SGD's first momentum.
/// With other optimizers the host waits in each step.
class SHARDWISE_API GradScaler {
 public:
  /// Raises ValueError for factors and intervals that cannot work.
  explicit GradScaler(const GradScalerOptions& options = {});
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;
  ///@{
  /// Takes over the other one's scale, and which optimizers it has unscaled or stepped.
  GradScaler(GradScaler&&) = default;
  GradScaler& operator=(GradScaler&&) = default;
  ///@}

  /// The loss, or an output, times the scale. The scale is on the device of the first loss or output.
  at::Tensor scale(const at::Tensor& output);
  /// Divides the gradients of the optimizer's parameters by the scale, once between two calls of update(). Raises
  /// ValueError for gradients in half precision, which may lose their values.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// The optimizer's step with divided gradients, unless one is not finite. An optimizer of ours that skips a step
  /// leaves gradients as they are if unscale_() was not called. Returns what the optimizer's step returns, without a
  /// closure.
  at::Tensor step(torch::optim::Optimizer& optimizer);
  /// Adapts the scale to the gradients since the last call, or sets it. Call it after the steps of all optimizers.
  void update(std::optional<double> new_scale = std::nullopt);

  /// Waits for the device; 1 if it is not enabled.
  double get_scale() const;
  /// Whether it scales at all: GradScalerOptions().enabled().
  bool is_enabled() const {
    return options_.enabled();
  }
  /// As PyTorch's: `scale`, `growth_factor`, `backoff_factor`, `growth_interval` and `_growth_tracker`, tensors of one
  /// number on the host. Empty if it is not enabled.
  StateDict state_dict() const;
  /// Does nothing if it is not enabled. Raises ValueError if something is missing.
  void load_state_dict(const StateDict& state);

 private:
  using Progress = detail::ScalerProgress;
  Progress& begin(torch::optim::Optimizer& optimizer, const char* function);

  GradScalerOptions options_;
  int64_t init_growth_tracker_ = 0;
  /// On the device; undefined before the first scale().
  at::Tensor scale_;
  at::Tensor growth_tracker_;
  std::unordered_map<torch::optim::Optimizer*, Progress> progress_;
};

} // namespace shardwise
