#include "optim/fused_batch.h"

#include "base/compute_guard.h"
#include "engine/front_end.h"
#include "nn/state/gradient_norm.h"
#include "optim/optimizer_class.h"

#include <shardwise/error.h>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <unordered_set>

namespace shardwise::optim {
namespace {

/// The name of a parameter of a unit, and this rank; "" for others.
std::string name_of(const at::Tensor& parameter) {
  const auto unit = engine::Unit::of(parameter);
  if (!unit) return "";
  for (const auto& known : unit->parameters()) {
    const bool is_shard = known->shard_identity() == parameter.unsafeGetTensorImpl();
    const bool is_leaf = known->alive() && known->leaf().is_same(parameter);
    if (is_shard || is_leaf) return c10::str(" ('", known->name(), "' on rank ", unit->mesh().rank(), ")");
  }
  return "";
}

std::string name_of(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

bool is_fusible(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kHalf || dtype == at::kBFloat16;
}

at::Tensor moved(const at::Tensor& tensor, at::Device device) {
  return tensor.defined() ? nn::moved_to(tensor, device) : tensor;
}

} // namespace

GradientScale GradientScale::on(at::Device device) const {
  const base::ComputeGuard guard;
  return {moved(scale, device), moved(found_inf, device)};
}

std::optional<GradientScale> GradientScale::decided() const {
  if (!found_inf.defined() || !found_inf.is_cpu()) return *this;
  if (*found_inf.const_data_ptr<float>() != 0) return std::nullopt;
  return GradientScale{scale, {}};
}

void FusedBatch::copy_back(const GradientScale& scale) const {
  if (!scale.scale.defined()) return;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!originals[i].is_same(gradients[i])) originals[i].copy_(gradients[i]);
  }
}

void FusedBatch::add(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& original) {
  parameters.push_back(parameter);
  gradients.push_back(gradient);
  originals.push_back(original);
}

std::string FusedBatches::describe(const at::Tensor& parameter) const {
  return c10::str(place_of(optimizer_, parameter), name_of(parameter), " of this ", name_);
}

void FusedBatches::check(const at::Tensor& parameter, const at::Tensor& gradient) const {
  const auto refuse = [&](const std::string& what, const std::string& remedy) {
    throw ValueError(c10::str("shardwise: ", describe(parameter), " ", what, ", so no step was made. ", remedy));
  };
  if (!is_fusible(parameter.scalar_type())) {
    refuse(
        c10::str("is ", name_of(parameter.scalar_type()), ", but it must be half, bfloat16, float or double"),
        c10::str("Use torch::optim::", name_, " for it, in an optimizer of its own."));
  }
  if (gradient.layout() != at::kStrided || parameter.layout() != at::kStrided) {
    refuse("or its gradient is sparse", "Make the layer with sparse(false), or use an optimizer for sparse gradients.");
  }
  if (!parameter.is_non_overlapping_and_dense()) {
    refuse("has gaps or overlaps in its memory", "Register a contiguous() copy of it as the parameter.");
  }
  if (gradient.scalar_type() != parameter.scalar_type()) {
    refuse(
        c10::str("is ", name_of(parameter.scalar_type()), ", but its gradient is ", name_of(gradient.scalar_type())),
        "Give it a gradient of its own dtype.");
  }
  if (gradient.device() != parameter.device()) {
    refuse(
        c10::str("is on ", parameter.device(), ", but its gradient on ", gradient.device()),
        "Call zero_grad() after moving a module, or move the gradient too.");
  }
  if (gradient.sizes() != parameter.sizes()) {
    refuse(
        c10::str("has sizes ", parameter.sizes(), ", but its gradient has ", gradient.sizes()),
        "Give a shard the gradient of this rank's piece.");
  }
}

std::vector<FusedBatch> FusedBatches::all() const {
  std::vector<FusedBatch> batches;
  std::unordered_set<const at::TensorImpl*> seen;
  for (size_t group = 0; group < optimizer_.param_groups().size(); ++group) {
    for (const auto& parameter : optimizer_.param_groups()[group].params()) {
      const auto& original = parameter.grad();
      if (!original.defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      check(parameter, original);
      const auto is_alike = [&](const FusedBatch& batch) {
        return batch.group == group && batch.device == parameter.device() && batch.dtype == parameter.scalar_type();
      };
      auto batch = std::find_if(batches.begin(), batches.end(), is_alike);
      if (batch == batches.end()) {
        batch = batches.insert(batches.end(), {group, parameter.device(), parameter.scalar_type()});
      }
      at::Tensor gradient = original;
      if (gradient.strides() != parameter.strides()) {
        const base::ComputeGuard guard;
        gradient = at::empty_like(parameter).copy_(original);
      }
      batch->add(parameter, gradient, original);
    }
  }
  return batches;
}

at::Tensor FusedBatches::fitting(const at::Tensor& kept, const at::Tensor& parameter) const {
  if (kept.defined() && kept.sizes() == parameter.sizes() && kept.dtype() == parameter.dtype() &&
      kept.device() == parameter.device() && kept.strides() == parameter.strides()) {
    return kept;
  }
  const base::ComputeGuard guard;
  if (!kept.defined()) return at::zeros_like(parameter);
  if (kept.sizes() == parameter.sizes()) return at::empty_like(parameter).copy_(kept);
  throw Error(c10::str(
      "shardwise: the state of ", describe(parameter), " has sizes ", kept.sizes(), ", but the parameter has ",
      parameter.sizes(),
      ". State that was saved for whole parameters, or on another number of ranks, does not fit shards. Load what this "
      "model saved on the same number of ranks, each rank its own; or give whole tensors to "
      "load_full_optimizer_state_dict()."));
}

void FusedBatches::refuse_state(const at::Tensor& parameter) const {
  throw Error(c10::str(
      "shardwise: the state of ", describe(parameter), " is not of torch::optim's class ", name_,
      "ParamState. Put an object of that class, or of one derived from it, into state()."));
}

} // namespace shardwise::optim
