#include "optim/finite_check.h"

#include "base/compute_guard.h"
#include "nn/state/gradient_norm.h"
#include "nn/wrap/split_axes.h"
#include "nn/wrap/unit_meshes.h"

#include <shardwise/error.h>

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <unordered_set>

namespace shardwise::optim {
namespace {

constexpr auto kWhat = "the all-reduce of GradScaler";

/// Gradients of a dtype on a device.
struct Alike {
  at::Device device;
  at::ScalarType dtype;
  std::vector<at::Tensor> values;
};

/// What the optimizer's parameters are made of.
struct Found {
  std::vector<Alike> gradients;
  nn::UnitMeshes::Units units;
  nn::SplitAxes axes;
};

void add(std::vector<Alike>& all, const at::Tensor& values) {
  const auto is_same = [&](const Alike& alike) {
    return alike.device == values.device() && alike.dtype == values.scalar_type();
  };
  auto alike = std::find_if(all.begin(), all.end(), is_same);
  if (alike == all.end()) alike = all.insert(all.end(), {values.device(), values.scalar_type(), {}});
  alike->values.push_back(values);
}

Found find(const torch::optim::Optimizer& optimizer, bool takes_half) {
  Found found;
  std::unordered_set<const at::TensorImpl*> seen;
  std::unordered_set<const engine::Unit*> known;
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const auto& parameters = optimizer.param_groups()[group].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& parameter = parameters[i];
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      auto unit = engine::unit_of_shard(parameter);
      if (!unit) unit = engine::Unit::of(parameter);
      // Which collectives there are follows from the units, whether this rank has a gradient or not.
      if (unit && known.insert(unit.get()).second) found.units.push_back(std::move(unit));
      nn::add_axis(found.axes, nn::split_axis_of(parameter));
      auto gradient = parameter.grad();
      if (!gradient.defined()) continue;
      if (gradient.scalar_type() == at::kHalf && !takes_half) {
        throw ValueError(c10::str(
            "shardwise: GradScaler was to divide the gradient of parameter ", i, " of group ", group,
            ", which is in half precision, where it may lose its value. Keep parameters in single precision, with "
            "MixedPrecision().param_dtype(torch::kHalf) to compute in half; or use an optimizer of shardwise without "
            "unscale_()."));
      }
      add(found.gradients, gradient.is_sparse() ? gradient._values() : gradient);
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

} // namespace

at::Tensor multiply_and_check(const torch::optim::Optimizer& optimizer, const at::Tensor& factor, bool takes_half) {
  const auto found = find(optimizer, takes_half);
  at::Tensor total;
  {
    const base::ComputeGuard guard;
    total = at::zeros({}, factor.options());
  }
  for (const auto& alike : found.gradients) {
    at::Tensor there;
    at::Tensor factor_there;
    {
      const base::ComputeGuard guard;
      there = alike.device == total.device() ? total : at::zeros({}, total.options().device(alike.device));
      factor_there = nn::moved_to(factor, alike.device);
    }
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

} // namespace shardwise::optim
