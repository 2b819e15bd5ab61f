#include <shardwise/clip_grad_norm.h>

#include "engine/front_end.h"
#include "group/compute_guard.h"
#include "nn/module_state.h"

#include <shardwise/error.h>

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <unordered_set>

namespace shardwise {
namespace {

constexpr auto kWhat = "the all-reduce of clip_grad_norm_";

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

/// One of these units for each process group of shards.
std::vector<std::shared_ptr<engine::Unit>> one_for_each_group(const std::vector<std::shared_ptr<engine::Unit>>& units) {
  std::vector<std::shared_ptr<engine::Unit>> some;
  for (const auto& unit : units) {
    const auto same = [&](const auto& other) { return other->shards() == unit->shards(); };
    if (std::none_of(some.begin(), some.end(), same)) some.push_back(unit);
  }
  return some;
}

/// The values that a gradient stores: of a sparse one, without its zeros.
at::Tensor values_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient.coalesce()._values() : gradient;
}

/// The norm of a vector that comes in parts, some of them on other ranks. Between add() and value() it is kept as a sum
/// of p-th powers, or for infinity as a maximum. That any element is not a number is kept apart, since a maximum may
/// lose it.
class Norm {
 public:
  explicit Norm(double order) : order_(order) {}

  /// `weight`: the share of it that this rank adds, where other ranks add theirs.
  void add(const at::Tensor& gradient, double weight) {
    const group::ComputeGuard guard;
    const auto values = values_of(gradient);
    if (values.numel() == 0) return;
    const auto type = values.scalar_type();
    const auto in = type == at::kHalf || type == at::kBFloat16 ? std::optional(at::kFloat) : std::nullopt;
    const auto norm = at::linalg_vector_norm(values, order_, std::nullopt, false, in).to(at::kDouble);
    auto& terms = waiting_[norm.device().str()];
    terms.norms.push_back(norm);
    terms.weights.push_back(weight);
  }

  /// Adds up what this rank has, with one wait for each device instead of one for each gradient.
  void finish() {
    const group::ComputeGuard guard;
    for (const auto& [device, terms] : waiting_) {
      const auto norms = at::stack(terms.norms);
      const auto term =
          is_maximum() ? norms.amax() : norms.pow(order_).mul(at::tensor(terms.weights, norms.options())).sum();
      const auto value = term.item<double>();
      if (std::isnan(value)) {
        is_nan_ = 1;
      } else {
        power_ = is_maximum() ? std::max(power_, value) : power_ + value;
      }
    }
    waiting_.clear();
  }

  void reduce(engine::Unit& unit) {
    if (unit.shards().size() == 1) return;
    const group::ComputeGuard guard;
    const auto wire = at::tensor({power_, is_nan_}, at::kDouble).to(unit.mesh().device());
    const auto op = is_maximum() ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    unit.ranks()
        .for_event(comm::Agreement::kClipping, kWhat, unit.own_counters())
        .all_reduce(wire, kWhat, unit.own_counters(), op)
        .wait();
    const auto reduced = wire.cpu();
    power_ = reduced.data_ptr<double>()[0];
    is_nan_ = reduced.data_ptr<double>()[1];
  }

  Norm& operator+=(const Norm& other) {
    power_ = is_maximum() ? std::max(power_, other.power_) : power_ + other.power_;
    is_nan_ += other.is_nan_;
    return *this;
  }

  double value() const {
    if (is_nan_ > 0) return std::numeric_limits<double>::quiet_NaN();
    return is_maximum() ? power_ : std::pow(power_, 1 / order_);
  }

 private:
  struct Terms {
    std::vector<at::Tensor> norms;
    std::vector<double> weights;
  };
  bool is_maximum() const {
    return std::isinf(order_);
  }

  double order_;
  std::map<std::string, Terms> waiting_;
  double power_ = 0;
  double is_nan_ = 0;
};

} // namespace

double clip_grad_norm_(
    const std::vector<at::Tensor>& parameters, double max_norm, double norm_type, bool error_if_nonfinite) {
  check(max_norm, norm_type);
  std::unordered_set<at::TensorImpl*> seen;
  std::vector<std::pair<at::Tensor, std::shared_ptr<engine::Unit>>> gradients;
  std::vector<std::shared_ptr<engine::Unit>> sharded;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& parameter = parameters[i];
    if (!parameter.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    // Which collectives there are follows from the units, whether this rank has a gradient or not.
    auto unit = engine::unit_of_shard(parameter);
    if (unit) {
      // With a single shard each rank has the whole parameter, and adds its share as for one that no unit has.
      unit->shards().size() > 1 ? sharded.push_back(unit) : unit.reset();
    } else if (const auto other = engine::Unit::of(parameter); other && other->has_full_copies()) {
      refuse_full_copy(parameter, *other);
    }
    if (parameter.is_meta()) refuse_without_values(parameter, i);
    if (parameter.grad().defined()) gradients.emplace_back(parameter.grad(), std::move(unit));
  }
  const auto meshes = one_for_each_group(sharded);
  Norm total(norm_type);
  // What every rank has whole is added to the shards of the first mesh, a share from each rank. So all ranks get the
  // same norm, and whatever is not finite anywhere is seen everywhere.
  const auto share = meshes.empty() ? 1.0 : 1.0 / meshes.front()->shards().size();
  for (size_t i = 0; i < std::max<size_t>(meshes.size(), 1); ++i) {
    Norm part(norm_type);
    for (const auto& [gradient, unit] : gradients) {
      if (!unit && i == 0) part.add(gradient, share);
      if (unit && unit->shards() == meshes[i]->shards()) part.add(gradient, 1);
    }
    part.finish();
    if (!meshes.empty()) part.reduce(*meshes[i]);
    total += part;
  }
  const auto norm = total.value();
  if (error_if_nonfinite && !std::isfinite(norm)) {
    throw Error(c10::str(
        "shardwise: the total norm of order ", norm_type, " of the gradients is ", norm,
        " and cannot be clipped; no gradient was changed. Skip this step on all ranks, or call with "
        "error_if_nonfinite = false to scale by it all the same."));
  }
  const auto scale = std::min(max_norm / (norm + 1e-6), 1.0);
  if (scale == 1.0) return norm;
  const c10::InferenceMode no_inference(false);
  const c10::AutoGradMode no_grad(false);
  for (auto& [gradient, unit] : gradients) gradient.mul_(scale);
  return norm;
}

double clip_grad_norm_(const torch::nn::Module& module, double max_norm, double norm_type, bool error_if_nonfinite) {
  return clip_grad_norm_(module.parameters(), max_norm, norm_type, error_if_nonfinite);
}

} // namespace shardwise
