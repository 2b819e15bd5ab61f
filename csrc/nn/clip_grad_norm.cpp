#include <shardwise/clip_grad_norm.h>

#include "base/compute_guard.h"
#include "base/on_host.h"
#include "engine/front_end.h"
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

using Units = std::vector<std::shared_ptr<engine::Unit>>;

/// One of these units for each process group of shards.
Units one_for_each_group(const Units& units) {
  Units some;
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
    const base::ComputeGuard guard;
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
    const base::ComputeGuard guard;
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
    reduce(unit, {unit.ranks().for_event(comm::Agreement::kClipping, kWhat, unit.own_counters())});
  }

  /// Over all ranks of the unit's mesh.
  void reduce_to_all(engine::Unit& unit) {
    reduce(unit, unit.ranks().all_for_event(comm::Agreement::kClipping, kWhat, unit.own_counters()));
  }

  void reduce(engine::Unit& unit, const std::vector<comm::Collectives>& ranks) {
    const base::ComputeGuard guard;
    const auto wire = at::tensor({power_, is_nan_}, base::on_host(at::kDouble)).to(unit.mesh().device());
    const auto op = is_maximum() ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    for (const auto& some : ranks) {
      if (some.size() > 1) some.all_reduce(wire, kWhat, unit.own_counters(), op).wait();
    }
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

/// A gradient, and the unit of its parameter if it has one.
struct Gradient {
  at::Tensor values;
  std::shared_ptr<engine::Unit> unit;
  /// Whether every rank of the unit has all of it.
  bool is_whole;
};

/// The norm of all gradients on all ranks. Parameters on a mesh of fewer ranks than the widest, as experts are, differ
/// between the meshes of that kind: they are added up over the widest one.
Norm norm_of(const std::vector<Gradient>& gradients, const Units& units, double order) {
  const auto ranks_of = [](const auto& unit) { return unit->ranks().world(); };
  const auto widest = std::max_element(
      units.begin(), units.end(), [&](const auto& a, const auto& b) { return ranks_of(a) < ranks_of(b); });
  const auto is_narrow = [&](const auto& unit) {
    return unit && ranks_of(unit) > 1 && ranks_of(unit) < ranks_of(*widest);
  };
  auto sharded = units;
  std::erase_if(sharded, [&](const auto& unit) { return unit->shards().size() == 1 || is_narrow(unit); });
  const auto meshes = one_for_each_group(sharded);
  Norm total(order);
  // What every rank has whole is added to the shards of the first mesh, a share from each rank. So all ranks get the
  // same norm, and whatever is not finite anywhere is seen everywhere.
  const auto share = meshes.empty() ? 1.0 : 1.0 / meshes.front()->shards().size();
  for (size_t i = 0; i < std::max<size_t>(meshes.size(), 1); ++i) {
    Norm part(order);
    for (const auto& [gradient, unit, is_whole] : gradients) {
      if (is_narrow(unit)) continue;
      if (is_whole && i == 0) part.add(gradient, share);
      if (!is_whole && unit->shards() == meshes[i]->shards()) part.add(gradient, 1);
    }
    part.finish();
    if (!meshes.empty()) part.reduce(*meshes[i]);
    total += part;
  }
  if (std::any_of(units.begin(), units.end(), is_narrow)) {
    Norm part(order);
    for (const auto& [gradient, unit, is_whole] : gradients) {
      if (!is_narrow(unit)) continue;
      part.add(gradient, 1.0 / static_cast<double>(is_whole ? ranks_of(unit) : unit->ranks().copies().size()));
    }
    part.finish();
    part.reduce_to_all(**widest);
    total += part;
  }
  return total;
}

} // namespace

double clip_grad_norm_(
    const std::vector<at::Tensor>& parameters, double max_norm, double norm_type, bool error_if_nonfinite) {
  check(max_norm, norm_type);
  std::unordered_set<at::TensorImpl*> seen;
  std::vector<Gradient> gradients;
  Units units;
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
    if (parameter.grad().defined()) gradients.push_back({parameter.grad(), std::move(unit), is_whole});
  }
  const auto total = norm_of(gradients, units, norm_type);
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
  for (auto& gradient : gradients) gradient.values.mul_(scale);
  return norm;
}

double clip_grad_norm_(const torch::nn::Module& module, double max_norm, double norm_type, bool error_if_nonfinite) {
  return clip_grad_norm_(module.parameters(), max_norm, norm_type, error_if_nonfinite);
}

} // namespace shardwise
