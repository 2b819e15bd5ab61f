#include "nn/state/gradient_norm.h"

#include "base/compute_guard.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

namespace shardwise::nn {
namespace {

constexpr auto kWhat = "the all-reduce of clip_grad_norm_";

/// The values that a gradient stores: of a sparse one, without its zeros.
at::Tensor values_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient.coalesce()._values() : gradient;
}

} // namespace

at::Tensor moved_to(const at::Tensor& tensor, at::Device device) {
  return tensor.to(device, tensor.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

void add_to_same_kind(std::vector<SameKind>& all, const at::Tensor& values) {
  const auto is_same = [&](const SameKind& alike) {
    return alike.device == values.device() && alike.dtype == values.scalar_type();
  };
  auto alike = std::find_if(all.begin(), all.end(), is_same);
  if (alike == all.end()) alike = all.insert(all.end(), {values.device(), values.scalar_type(), {}});
  alike->values.push_back(values);
}

GradientNorm::GradientNorm(double order, at::Device home) : order_(order), home_(home) {
  const base::ComputeGuard guard;
  power_ = is_nan_ = at::zeros({}, at::TensorOptions(home).dtype(at::kDouble));
}

bool GradientNorm::is_maximum() const {
  return std::isinf(order_);
}

void GradientNorm::add(const at::Tensor& gradient, double weight) {
  const base::ComputeGuard guard;
  const auto values = values_of(gradient);
  if (values.numel() == 0) return;
  add_to_same_kind(waiting_[weight], values);
}

void GradientNorm::finish() {
  const base::ComputeGuard guard;
  for (const auto& [weight, all] : std::exchange(waiting_, {})) {
    for (const auto& terms : all) {
      const bool is_half = terms.dtype == at::kHalf || terms.dtype == at::kBFloat16;
      const auto in = is_half ? std::optional(at::kFloat) : std::nullopt;
      const auto norms = at::stack(at::_foreach_norm(terms.values, order_, in)).to(at::kDouble);
      auto power = is_maximum() ? norms.amax() : norms.pow(order_).sum();
      if (!is_maximum() && weight != 1) power = power.mul(weight);
      power = moved_to(power, home_);
      const auto is_nan = power.isnan();
      add_up(power.masked_fill(is_nan, 0), is_nan.to(at::kDouble));
    }
  }
}

void GradientNorm::add_up(const at::Tensor& power, const at::Tensor& is_nan) {
  power_ = is_maximum() ? at::maximum(power_, power) : power_.add(power);
  is_nan_ = is_nan_.add(is_nan);
}

void GradientNorm::reduce(engine::Unit& unit) {
  auto& counters = unit.own_counters();
  reduce({unit.ranks().for_event(comm::Agreement::kClipping, kWhat, counters)}, unit.device(), counters);
}

void GradientNorm::reduce_to_all(engine::Unit& unit) {
  auto& counters = unit.own_counters();
  reduce(unit.ranks().all_for_event(comm::Agreement::kClipping, kWhat, counters), unit.device(), counters);
}

void GradientNorm::reduce(const split::SplitAxis& axis) {
  reduce({axis.ranks}, axis.mesh.device(), axis.counters);
}

void GradientNorm::reduce(const std::vector<comm::Collectives>& ranks, at::Device device, Counters& counters) {
  const base::ComputeGuard guard;
  const auto wire = moved_to(at::stack({power_, is_nan_}), device);
  const auto op = is_maximum() ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  for (const auto& some : ranks) {
    if (some.size() > 1) some.all_reduce(wire, kWhat, counters, op).wait();
  }
  const auto reduced = moved_to(wire, home_);
  power_ = reduced.select(0, 0);
  is_nan_ = reduced.select(0, 1);
}

GradientNorm& GradientNorm::operator+=(const GradientNorm& other) {
  const base::ComputeGuard guard;
  add_up(other.power_, other.is_nan_);
  return *this;
}

at::Tensor GradientNorm::value() const {
  const base::ComputeGuard guard;
  const auto norm = is_maximum() ? power_ : power_.pow(1 / order_);
  return norm.masked_fill(is_nan_.gt(0), std::numeric_limits<double>::quiet_NaN());
}

} // namespace shardwise::nn
