#include <shardwise/clip_grad_norm.h>

#include "base/compute_guard.h"
#include "base/on_host.h"
#include "engine/front_end.h"
#include "nn/state/gradient_norm.h"
#include "nn/wrap/split_axes.h"
#include "nn/wrap/unit_meshes.h"

#include <shardwise/error.h>

#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/full_like.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <unordered_set>

namespace shardwise {
namespace {

void check(double max_norm, double norm_type) {
  if (!(norm_type > 0)) {
    throw ValueError(c10::str("shardwise: norm_type is ", norm_type, "; it must be above 0, or infinity."));
  }
  if (std::isnan(max_norm)) throw ValueError("shardwise: max_norm is not a number. Give the largest norm allowed.");
}

// A full copy has no gradient, so clipping it would silently do nothing.
void refuse_full_copy(const at::Tensor& tensor, const engine::Unit& unit) {
  for (const auto& parameter : unit.parameters()) {
    if (parameter->whole || !parameter->alive() || !parameter->leaf().is_same(tensor)) continue;
    throw ValueError(c10::str(
        "shardwise: clip_grad_norm_ was given the full copy of '", parameter->name(),
        "', which has no gradient of its own. Give it the module, or the module's parameters(), which are the "
        "shards."));
  }
}

[[noreturn]] void refuse_without_values(const at::Tensor& parameter, size_t index) {
  if (const auto unit = engine::Unit::of(parameter)) unit->need_values();
  throw Error(engine::still_on_meta(
      std::nullopt, {c10::str("number ", index, ", counted from 0, of the parameters given to clip_grad_norm_")}));
}

using Units = nn::UnitMeshes::Units;

/// A gradient, and the unit of its parameter if it has one.
struct Gradient {
  at::Tensor values;
  std::shared_ptr<engine::Unit> unit;
  /// Whether every rank of the unit has all of it.
  bool is_whole;
  /// The axis along which parallelize() divided its parameter; null if it did not.
  std::shared_ptr<const split::SplitAxis> axis;
};

/// The norm of these gradients over all ranks of their units.
nn::GradientNorm norm_of(
    const std::vector<Gradient>& gradients, const nn::UnitMeshes& ranks, double order, at::Device home) {
  const auto& meshes = ranks.shards();
  nn::GradientNorm total(order, home);
  // Gradients that every rank has whole are added to the shards of the first mesh, a share from each rank. So all ranks
  // get the same norm, and it is not finite anywhere if a gradient is not finite on one rank.
  const auto share = meshes.empty() ? 1.0 : 1.0 / meshes.front()->shards().size();
  for (size_t i = 0; i < std::max<size_t>(meshes.size(), 1); ++i) {
    nn::GradientNorm part(order, home);
    for (const auto& [gradient, unit, is_whole, axis] : gradients) {
      if (ranks.is_narrow(unit)) continue;
      if (is_whole && i == 0) part.add(gradient, share);
      if (!is_whole && unit->shards() == meshes[i]->shards()) part.add(gradient, 1);
    }
    part.finish();
    if (!meshes.empty()) part.reduce(*meshes[i]);
    total += part;
  }
  if (ranks.has_narrow()) {
    nn::GradientNorm part(order, home);
    for (const auto& [gradient, unit, is_whole, axis] : gradients) {
      if (!ranks.is_narrow(unit)) continue;
      const auto holders = is_whole ? unit->ranks().world() : unit->ranks().copies().size();
      part.add(gradient, 1.0 / static_cast<double>(holders));
    }
    part.finish();
    part.reduce_to_all(*ranks.widest());
    total += part;
  }
  return total;
}

/// Scales them by a factor that is on the device of the norm. The host reads it only if gradients are on the host.
void scale(const std::vector<Gradient>& gradients, const at::Tensor& factor) {
  const c10::InferenceMode no_inference(false);
  const c10::AutoGradMode no_grad(false);
  std::vector<nn::SameKind> all;
  for (const auto& [values, unit, is_whole, axis] : gradients) {
    nn::add_to_same_kind(all, values.is_sparse() ? values._values() : values);
  }
  for (const auto& alike : all) {
    if (alike.device.is_cpu()) {
      const auto number = factor.item<double>();
      if (number != 1) at::_foreach_mul_(alike.values, number);
      continue;
    }
    const bool is_half = alike.dtype == at::kHalf || alike.dtype == at::kBFloat16;
    const auto dtype = is_half ? at::kFloat : c10::toRealValueType(alike.dtype);
    const auto there = base::guarded([&] { return nn::moved_to(factor, alike.device).to(dtype); });
    if (!is_half) {
      at::_foreach_mul_(alike.values, there);
      continue;
    }
    // In single precision. With a factor on a device torch would multiply in half precision.
    for (const auto& half : alike.values) half.copy_(half.to(at::kFloat).mul_(there));
  }
}

/// The norm of all gradients on all ranks. What parallelize() divided is added up over its axis too; the ranks along
/// it have all else alike.
nn::GradientNorm norm_of(
    const std::vector<Gradient>& gradients, const Units& units, const nn::SplitAxes& axes, double order) {
  const auto home = !units.empty()       ? units.front()->mesh().device()
                    : !gradients.empty() ? gradients.front().values.device()
                                         : at::Device(at::kCPU);
  const nn::UnitMeshes ranks(units);
  const auto on = [&](const auto& axis) {
    std::vector<Gradient> some;
    const auto belongs = [&](const Gradient& one) {
      return axis == nullptr ? !one.axis : one.axis && one.axis->ranks == axis->ranks;
    };
    std::copy_if(gradients.begin(), gradients.end(), std::back_inserter(some), belongs);
    return some;
  };
  if (axes.empty()) return norm_of(gradients, ranks, order, home);
  auto total = norm_of(on(nn::SplitAxes::value_type()), ranks, order, home);
  for (const auto& axis : axes) {
    auto part = norm_of(on(axis), ranks, order, home);
    part.reduce(*axis);
    total += part;
  }
  return total;
}

} // namespace

at::Tensor clip_grad_norm_(
    const std::vector<at::Tensor>& parameters, double max_norm, double norm_type, bool error_if_nonfinite) {
  check(max_norm, norm_type);
  std::unordered_set<at::TensorImpl*> seen;
  std::vector<Gradient> gradients;
  Units units;
  nn::SplitAxes axes;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    if (!parameter.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    // Which collectives there are follows from the units, whether this rank has a gradient or not.
    auto unit = engine::unit_of_shard(parameter);
    // With a single shard each rank has the whole parameter.
    const bool is_whole = !unit || unit->shards().size() == 1;
    if (!unit) {
      unit = engine::Unit::of(parameter);
      if (unit && unit->has_full_copies()) refuse_full_copy(parameter, *unit);
    }
    if (unit) units.push_back(unit);
    if (parameter.is_meta()) refuse_without_values(parameter, i);
    const auto axis = nn::split_axis_of(parameter);
    nn::add_axis(axes, axis);
    if (parameter.grad().defined()) gradients.push_back({parameter.grad(), std::move(unit), is_whole, axis});
  }
  const auto norm = norm_of(gradients, units, axes, norm_type).value();
  if (error_if_nonfinite && !std::isfinite(norm.item<double>())) {
    throw Error(c10::str(
        "shardwise: the total norm of order ", norm_type, " of the gradients is ", norm.item<double>(),
        " and cannot be clipped; no gradient was changed. Skip this step on all ranks, or call with "
        "error_if_nonfinite = false to scale by it all the same."));
  }
  const auto factor = base::guarded([&] { return at::full_like(norm, max_norm).div(norm.add(1e-6)).clamp_max(1); });
  scale(gradients, factor);
  return norm;
}

at::Tensor clip_grad_norm_(
    const torch::nn::Module& module, double max_norm, double norm_type, bool error_if_nonfinite) {
  return clip_grad_norm_(module.parameters(), max_norm, norm_type, error_if_nonfinite);
}

} // namespace shardwise
