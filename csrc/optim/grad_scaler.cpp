#include "base/compute_guard.h"
#include "base/on_host.h"
#include "comm/streams/last_use.h"
#include "nn/state/gradient_norm.h"
#include "nn/wrap/split_axes.h"
#include "nn/wrap/unit_meshes.h"
#include "optim/optimizer_class.h"

#include <shardwise/error.h>
#include <shardwise/grad_scaler.h>
#include <shardwise/optimizers.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <torch/optim/optimizer.h>

#include <unordered_set>
#include <utility>

namespace shardwise {
namespace {

constexpr auto kWhat = "the all-reduce of GradScaler";

/// What the optimizer's parameters are made of.
struct Found {
  std::vector<nn::SameKind> gradients;
  nn::UnitMeshes::Units units;
  nn::SplitAxes axes;
};

Found find(const torch::optim::Optimizer& optimizer, bool takes_half) {
  Found found;
  std::unordered_set<const at::TensorImpl*> seen;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      auto unit = engine::Unit::of(parameter);
      // Which collectives there are follows from the units, whether this rank has a gradient or not.
      if (unit) found.units.push_back(std::move(unit));
      nn::add_axis(found.axes, nn::split_axis_of(parameter));
      const auto& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      if (gradient.scalar_type() == at::kHalf && !takes_half) {
        throw ValueError(c10::str(
            "shardwise: GradScaler was about to divide the gradient of ", optim::place_of(optimizer, parameter),
            ", which is in half precision, where it may lose its value. Keep parameters in single precision, with "
            "MixedPrecision().param_dtype(torch::kHalf) to compute in half; or use an optimizer of shardwise without "
            "unscale_()."));
      }
      nn::add_to_same_kind(found.gradients, gradient.is_sparse() ? gradient._values() : gradient);
    }
  }
  return found;
}

/// The highest value that any rank has.
at::Tensor highest(
    const at::Tensor& number, const std::vector<comm::Collectives>& ranks, at::Device device, Counters& counters) {
  const auto wire = nn::moved_to(number, device).view({1});
  for (const auto& some : ranks) {
    if (some.size() > 1) some.all_reduce(wire, kWhat, counters, c10d::ReduceOp::MAX).wait();
  }
  return nn::moved_to(wire.select(0, 0), number.device());
}

/// Multiplies the gradients of all parameters of an optimizer by `factor`, a number in single precision. Returns one,
/// on the device of `factor`, if any of them was not finite on any rank that shares the parameters, else zero. Raises
/// ValueError for gradients in half precision, unless `takes_half`.
at::Tensor multiply_and_check(const torch::optim::Optimizer& optimizer, const at::Tensor& factor, bool takes_half) {
  const auto found = find(optimizer, takes_half);
  auto total = base::guarded([&] { return at::zeros({}, factor.options()); });
  for (const auto& alike : found.gradients) {
    auto there = base::guarded(
        [&] { return alike.device == total.device() ? total : at::zeros({}, total.options().device(alike.device)); });
    const auto factor_there = base::guarded([&] { return nn::moved_to(factor, alike.device); });
    {
      const c10::InferenceMode no_inference(false);
      const c10::AutoGradMode no_grad(false);
      at::_amp_foreach_non_finite_check_and_unscale_(alike.values, there, factor_there);
    }
    const base::ComputeGuard guard;
    if (!there.is_same(total)) total.copy_(at::maximum(total, nn::moved_to(there, total.device())));
  }
  const base::ComputeGuard guard;
  const nn::UnitMeshes meshes(found.units);
  const auto event = comm::Agreement::kScaling;
  for (const auto& unit : meshes.shards()) {
    auto& counters = unit->own_counters();
    total = highest(total, {unit->ranks().for_event(event, kWhat, counters)}, unit->mesh().device(), counters);
  }
  if (meshes.has_narrow()) {
    auto& unit = *meshes.widest();
    auto& counters = unit.own_counters();
    total = highest(total, unit.ranks().all_for_event(event, kWhat, counters), unit.mesh().device(), counters);
  }
  for (const auto& axis : found.axes) total = highest(total, {axis->ranks}, axis->mesh.device(), axis->counters);
  return total;
}

constexpr auto kScale = "scale";
constexpr auto kGrowthFactor = "growth_factor";
constexpr auto kBackoffFactor = "backoff_factor";
constexpr auto kGrowthInterval = "growth_interval";
constexpr auto kGrowthTracker = "_growth_tracker";

void check(const GradScalerOptions& options) {
  const auto refuse = [](const char* what, double value, const char* rule) {
    throw ValueError(c10::str("shardwise: GradScaler's ", what, " is ", value, "; it must be ", rule, "."));
  };
  if (!(options.init_scale() > 0)) refuse("init_scale", options.init_scale(), "above 0");
  if (!(options.growth_factor() > 1)) refuse("growth_factor", options.growth_factor(), "above 1");
  if (!(options.backoff_factor() > 0 && options.backoff_factor() < 1)) {
    refuse("backoff_factor", options.backoff_factor(), "above 0 and below 1");
  }
  if (options.growth_interval() < 1) {
    refuse("growth_interval", static_cast<double>(options.growth_interval()), "at least 1");
  }
}

/// Waits for the device.
bool is_set(const at::Tensor& number) {
  const base::ComputeGuard guard;
  const auto what = [] { return std::string("learn whether GradScaler found gradients that are not finite"); };
  comm::need_no_capture(
      number.device(), what, "Use an optimizer of shardwise (AdamW, SGD), or leave the optimizer out of the graph.");
  return number.item<float>() != 0;
}

} // namespace

GradScaler::GradScaler(const GradScalerOptions& options) : options_(options) {
  if (is_enabled()) check(options);
}

at::Tensor GradScaler::scale(const at::Tensor& output) {
  if (!is_enabled()) return output;
  const auto there = base::guarded([&] {
    if (!scale_.defined()) {
      const at::TensorOptions options(output.device());
      scale_ = at::full({}, options_.init_scale(), options.dtype(at::kFloat));
      growth_tracker_ = at::full({}, init_growth_tracker_, options.dtype(at::kInt));
    }
    // A copy: what autograd saves must stay when the scale changes.
    return nn::moved_to(scale_, output.device()).clone();
  });
  return output * there;
}

GradScaler::Progress& GradScaler::begin(torch::optim::Optimizer& optimizer, const char* function) {
  if (!scale_.defined()) {
    throw Error(c10::str(
        "shardwise: GradScaler::", function,
        "() was called before any scale(), so gradients cannot be scaled. Call scaler.scale(loss).backward()."));
  }
  auto& progress = progress_[&optimizer];
  if (progress.stage == Progress::Stage::stepped) {
    throw Error(c10::str(
        "shardwise: GradScaler::", function,
        "() was called after step() for the same optimizer. Call update() once after each step."));
  }
  return progress;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return;
  auto& progress = begin(optimizer, "unscale_");
  if (progress.stage == Progress::Stage::unscaled) {
    throw Error(
        "shardwise: GradScaler::unscale_() was called twice for the same optimizer, and gradients were divided "
        "already. Call it once between two calls of update().");
  }
  const auto factor = base::guarded([&] { return scale_.to(at::kDouble).reciprocal().to(at::kFloat); });
  progress.found_inf = multiply_and_check(optimizer, factor, /*takes_half=*/false);
  progress.stage = Progress::Stage::unscaled;
}

at::Tensor GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!is_enabled()) return optimizer.step();
  auto* const fused = dynamic_cast<detail::ScaledStep*>(&optimizer);
  auto& progress = begin(optimizer, "step");
  if (fused == nullptr) {
    if (progress.stage == Progress::Stage::ready) unscale_(optimizer);
    at::Tensor result;
    if (!is_set(progress.found_inf)) result = optimizer.step();
    progress.stage = Progress::Stage::stepped;
    return result;
  }
  // Whatever happens in the step, the next one without a scaler has neither.
  const auto clear = c10::make_scope_exit([fused] { fused->grad_scale_ = fused->found_inf_ = at::Tensor(); });
  if (progress.stage == Progress::Stage::ready) {
    const auto one = base::guarded([&] { return at::ones({}, scale_.options()); });
    fused->grad_scale_ = base::guarded([&] { return scale_.clone(); });
    progress.found_inf = multiply_and_check(optimizer, one, /*takes_half=*/true);
  }
  fused->found_inf_ = progress.found_inf;
  auto result = optimizer.step();
  progress.stage = Progress::Stage::stepped;
  return result;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!is_enabled()) return;
  const base::ComputeGuard guard;
  if (!scale_.defined()) {
    throw Error("shardwise: GradScaler::update() was called before any scale(). Call scaler.scale(loss).backward().");
  }
  if (new_scale) {
    scale_.fill_(*new_scale);
    progress_.clear();
    return;
  }
  at::Tensor found;
  for (const auto& [optimizer, progress] : std::exchange(progress_, {})) {
    if (!progress.found_inf.defined()) continue;
    found = found.defined() ? at::maximum(found, progress.found_inf) : progress.found_inf;
  }
  if (!found.defined()) {
    throw Error(
        "shardwise: GradScaler::update() was called, but no gradients were checked since the last time. Call step() "
        "or unscale_() before it.");
  }
  at::_amp_update_scale_(
      scale_, growth_tracker_, found, options_.growth_factor(), options_.backoff_factor(), options_.growth_interval());
}

double GradScaler::get_scale() const {
  if (!is_enabled()) return 1;
  const base::ComputeGuard guard;
  return scale_.defined() ? scale_.item<double>() : options_.init_scale();
}

StateDict GradScaler::state_dict() const {
  StateDict state;
  if (!is_enabled()) return state;
  const base::ComputeGuard guard;
  const auto number = [&](const char* name, double value) {
    state.insert(name, at::scalar_tensor(value, base::on_host(at::kDouble)));
  };
  const auto integer = [&](const char* name, int64_t value) {
    state.insert(name, at::scalar_tensor(value, base::on_host(at::kLong)));
  };
  number(kScale, get_scale());
  number(kGrowthFactor, options_.growth_factor());
  number(kBackoffFactor, options_.backoff_factor());
  integer(kGrowthInterval, options_.growth_interval());
  integer(kGrowthTracker, growth_tracker_.defined() ? growth_tracker_.item<int64_t>() : init_growth_tracker_);
  return state;
}

void GradScaler::load_state_dict(const StateDict& state) {
  if (!is_enabled()) return;
  const base::ComputeGuard guard;
  for (const auto* name : {kScale, kGrowthFactor, kBackoffFactor, kGrowthInterval, kGrowthTracker}) {
    const auto* value = state.find(name);
    if (value != nullptr && value->defined() && value->numel() == 1) continue;
    throw ValueError(c10::str(
        "shardwise: the state of a GradScaler needs one number as '", name,
        "', which is missing. Give the state_dict() of one that was enabled."));
  }
  auto options = options_;
  options.init_scale(state[kScale].item<double>())
      .growth_factor(state[kGrowthFactor].item<double>())
      .backoff_factor(state[kBackoffFactor].item<double>())
      .growth_interval(state[kGrowthInterval].item<int64_t>());
  check(options);
  options_ = options;
  init_growth_tracker_ = state[kGrowthTracker].item<int64_t>();
  if (!scale_.defined()) return;
  scale_.fill_(options_.init_scale());
  growth_tracker_.fill_(init_growth_tracker_);
}

} // namespace shardwise
