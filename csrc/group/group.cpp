#include "group/group.h"

#include "group/compute_guard.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::group {
namespace {

constexpr int64_t kAlignmentBytes = 128;

std::vector<int64_t> row_major(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

} // namespace

Group::Group(std::vector<Parameter*> parameters) : parameters_(std::move(parameters)) {
  std::vector<int64_t> numels;
  for (const auto* parameter : parameters_) {
    const auto leaf = parameter->leaf();
    // Gradients keep the memory format of their parameter, as autograd's do.
    shapes_.push_back(
        {leaf.sizes().vec(), leaf.is_non_overlapping_and_dense() ? leaf.strides().vec() : row_major(leaf.sizes())});
    numels.push_back(leaf.numel());
    options_ = leaf.options().requires_grad(false);
  }
  layout_ = layout::flat(numels, std::max<int64_t>(1, kAlignmentBytes / options_.dtype().itemsize()));
}

std::vector<Group> Group::make(const std::vector<Parameter*>& parameters) {
  std::vector<std::vector<Parameter*>> parts;
  const auto same = [](const Parameter& a, const Parameter& b) {
    return a.leaf().scalar_type() == b.leaf().scalar_type() && a.leaf().device() == b.leaf().device();
  };
  for (auto* parameter : parameters) {
    const auto part =
        std::find_if(parts.begin(), parts.end(), [&](const auto& p) { return same(*p.front(), *parameter); });
    if (part == parts.end()) {
      parts.push_back({parameter});
    } else {
      part->push_back(parameter);
    }
  }
  std::vector<Group> groups;
  for (auto& part : parts) groups.emplace_back(std::move(part));
  return groups;
}

bool Group::fits() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto leaf = parameters_[i]->leaf();
    if (leaf.scalar_type() != options_.dtype().toScalarType() || leaf.device() != options_.device() ||
        leaf.sizes() != shapes_[i].sizes) {
      return false;
    }
  }
  return true;
}

at::Tensor Group::gradient_view(size_t index) const {
  return bucket_.as_strided(shapes_[index].sizes, shapes_[index].strides, layout_.offsets[index]);
}

at::Tensor Group::counts_view() const {
  return bucket_.narrow(0, layout_.total, static_cast<int64_t>(parameters_.size()));
}

// Gradients that are kept past zero_grad() are views of the bucket, which is then left to them: two take turns.
void Group::provide_bucket(Counters& counters) {
  const auto is_free = [](const at::Tensor& bucket) { return bucket.defined() && bucket.storage().use_count() == 1; };
  if (is_free(bucket_)) return;
  std::swap(bucket_, spare_);
  if (is_free(bucket_)) return;
  bucket_ = at::zeros({layout_.total + static_cast<int64_t>(parameters_.size())}, options_);
  ++counters.allocations;
}

void Group::begin_reduce(const comm::Collectives& collectives, const std::string& unit, Counters& counters) {
  RECORD_FUNCTION(c10::str("FSDP::post_backward_reduce (", unit, ")"), std::vector<c10::IValue>());
  {
    const ComputeGuard guard;
    provide_bucket(counters);
    const double scale = 1.0 / collectives.size();
    used_here_.assign(parameters_.size(), false);
    std::vector<float> counts(parameters_.size(), 0);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto local = parameters_[i]->take_local();
      auto slot = gradient_view(i);
      used_here_[i] = local.defined();
      if (!used_here_[i]) {
        slot.zero_();
        continue;
      }
      at::mul_out(slot, local, scale);
      counts[i] = 1;
      counters.copied_bytes += static_cast<int64_t>(slot.nbytes());
    }
    counts_view().copy_(at::from_blob(counts.data(), {static_cast<int64_t>(counts.size())}, at::kFloat));
  }
  const auto payload = bucket_.is_complex() ? at::view_as_real(bucket_).view({-1}) : bucket_;
  sum_ = collectives.all_reduce(
      payload,
      c10::str(
          "the all-reduce of the gradients of unit '", unit, "' (", parameters_.front()->name(), " and ",
          parameters_.size() - 1, " more parameters)"),
      counters);
}

void Group::finish_reduce() {
  sum_->wait();
  sum_.reset();
  const auto unused = std::find(used_here_.begin(), used_here_.end(), false) != used_here_.end();
  at::Tensor counts;
  // Only a rank that left a parameter unused has to look at the counts, and to wait for the device.
  if (unused) counts = at::real(counts_view()).to(at::kCPU, at::kFloat);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!used_here_[i] && counts.data_ptr<float>()[i] == 0) continue;
    at::Tensor mean;
    {
      const ComputeGuard guard;
      mean = gradient_view(i);
    }
    parameters_[i]->publish(mean);
  }
}

Plan::Group Group::plan() const {
  Plan::Group plan;
  plan.dtype = c10::getDtypeNames(options_.dtype().toScalarType()).first;
  plan.device = options_.device().str();
  plan.parameters = static_cast<int64_t>(parameters_.size());
  const auto item = static_cast<int64_t>(options_.dtype().itemsize());
  for (const auto* parameter : parameters_) plan.elements += parameter->leaf().numel();
  plan.bytes = plan.elements * item;
  plan.bucket_bytes = (layout_.total + plan.parameters) * item;
  return plan;
}

} // namespace shardwise::group
