#include "group/gradients.h"

#include "group/compute_guard.h"
#include "observe/seam.h"

#include <ATen/ScalarOps.h>
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

std::vector<int64_t> row_major(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor;
}

} // namespace

Gradients::Gradients(std::vector<Parameter*> parameters, layout::Shards layout)
    : parameters_(std::move(parameters)),
      layout_(std::move(layout)) {
  for (const auto* parameter : parameters_) {
    const auto leaf = parameter->leaf();
    options_ = leaf.options().requires_grad(false);
    // Whole gradients keep the memory format of their parameter, as autograd's do.
    strides_.push_back(
        !scattered() && leaf.is_non_overlapping_and_dense() ? leaf.strides().vec() : row_major(leaf.sizes()));
  }
  for (const auto& cut : layout_.cuts) {
    auto& runs = runs_.emplace_back();
    for (int64_t rank = 0; rank < layout_.world; ++rank) runs.push_back(runs_of(cut, rank));
  }
}

at::Tensor Gradients::piece_in(const at::Tensor& buffer, size_t index, int64_t rank, int64_t start) const {
  const auto& cut = layout_.cuts[index];
  const auto offset = start + cut.offsets[rank];
  if (!scattered()) return view_of(buffer, parameters_[index]->leaf().sizes(), strides_[index], offset);
  const auto sizes = cut.piece_sizes(rank);
  return view_of(buffer, sizes, row_major(sizes), offset);
}

// Gradients that are kept past zero_grad() are views of the sum, which is then left to them: two take turns.
void Gradients::provide(comm::Buffers& buffers, Counters& counters) {
  const auto is_free = [](const at::Tensor& sum) { return sum.defined() && sum.storage().use_count() == 1; };
  if (!is_free(sum_)) std::swap(sum_, spare_);
  if (!is_free(sum_)) {
    sum_ = at::zeros({segment()}, options_);
    ++counters.allocations;
  }
  bucket_ = scattered() ? buffers.take(layout_.world * segment(), options_, counters) : sum_;
}

bool Gradients::fill_small(size_t index, const at::Tensor& gradient, double scale) {
  if (!is_small(gradient) || gradient.strides() != strides_[index] || gradient.dtype() != options_.dtype() ||
      gradient.is_neg()) {
    return false;
  }
  for (int64_t rank = 0; rank < layout_.world; ++rank) {
    const auto offset = rank * segment() + layout_.cuts[index].offsets[rank];
    if (!scale_runs(gradient, runs_[index][rank], scale, bucket_, offset)) return false;
  }
  return true;
}

void Gradients::fill(size_t index, const at::Tensor& gradient, double scale) {
  if (gradient.defined() && fill_small(index, gradient, scale)) return;
  const auto& cut = layout_.cuts[index];
  // at::mul_out with a plain number makes the product elsewhere and copies it.
  const auto factor = at::native::wrapped_scalar_tensor(scale);
  if (!scattered()) {
    auto slot = piece_in(bucket_, index, 0, 0);
    gradient.defined() ? at::mul_out(slot, gradient, factor) : slot.zero_();
    return;
  }
  const auto seen = gradient.defined() ? gradient.reshape(cut.shape) : at::Tensor();
  for (int64_t rank = 0; rank < layout_.world; ++rank) {
    if (cut.length(rank) == 0) continue;
    auto slot = piece_in(bucket_, index, rank, rank * segment());
    seen.defined() ? at::mul_out(slot, seen.narrow(cut.dim, cut.starts[rank], cut.length(rank)), factor) : slot.zero_();
  }
}

void Gradients::fill_counts() {
  bool done = bucket_.is_cpu();
  for (int64_t rank = 0; done && rank < layout_.world; ++rank) {
    done = put_flags(used_here_, bucket_, rank * segment() + layout_.part);
  }
  if (done) return;
  std::vector<float> counts(used_here_.begin(), used_here_.end());
  const auto n = static_cast<int64_t>(counts.size());
  const auto row = at::from_blob(counts.data(), {1, n}, at::kFloat);
  bucket_.view({-1, segment()}).narrow(1, layout_.part, n).copy_(row.expand({layout_.world, n}));
}

void Gradients::begin(
    const comm::Collectives& collectives, comm::Buffers& buffers, const std::string& unit, Counters& counters) {
  RECORD_FUNCTION(c10::str("FSDP::post_backward_reduce (", unit, ")"), std::vector<c10::IValue>());
  under_way_ = true;
  observe::pass(observe::Seam::reduce);
  rank_ = scattered() ? collectives.rank() : 0;
  at::Tensor payload;
  at::Tensor result;
  {
    const ComputeGuard guard;
    provide(buffers, counters);
    used_here_.assign(parameters_.size(), false);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto local = parameters_[i]->take_local();
      fill(i, local, 1.0 / collectives.size());
      used_here_[i] = local.defined();
      if (used_here_[i]) counters.copied_bytes += static_cast<int64_t>(local.nbytes());
    }
    fill_counts();
    payload = as_real(bucket_);
    result = as_real(sum_);
  }
  // Both outlive the sum: the unit has this, and waits before it goes.
  const auto what = [this, &unit] {
    return c10::str(
        scattered() ? "the reduce-scatter" : "the all-reduce", " of the gradients of unit '", unit, "' (",
        parameters_.front()->name(), " and ", parameters_.size() - 1, " more parameters)");
  };
  pending_ = scattered() ? collectives.reduce_scatter(result, payload, what, counters)
                         : collectives.all_reduce(payload, what, counters);
}

void Gradients::wait(comm::Buffers& buffers) {
  if (!pending_) return;
  observe::pass(observe::Seam::reduced);
  auto pending = std::move(*pending_);
  pending_.reset();
  pending.wait();
  const ComputeGuard guard;
  const auto bucket = std::exchange(bucket_, at::Tensor());
  if (scattered()) buffers.give(bucket);
}

void Gradients::drop(comm::Buffers& buffers) {
  if (!under_way_) return;
  under_way_ = false;
  auto pending = std::exchange(pending_, std::nullopt);
  const auto bucket = std::exchange(bucket_, at::Tensor());
  if (!pending) return;
  // After one that failed the memory may still be written to: it does not go back.
  if (!pending->settle()) {
    sum_ = at::Tensor();
  } else if (scattered()) {
    const ComputeGuard guard;
    buffers.give(bucket);
  }
}

void Gradients::publish() {
  under_way_ = false;
  for (auto* parameter : parameters_) parameter->settle();
  const auto unused = std::find(used_here_.begin(), used_here_.end(), false) != used_here_.end();
  at::Tensor counts;
  // Only a rank that left a parameter unused has to look at the counts, and to wait for the device.
  if (unused) {
    const ComputeGuard guard;
    counts = at::real(sum_.narrow(0, layout_.part, static_cast<int64_t>(parameters_.size()))).to(at::kCPU, at::kFloat);
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!used_here_[i] && counts.data_ptr<float>()[i] == 0) continue;
    at::Tensor mean;
    {
      const ComputeGuard guard;
      mean = piece_in(sum_, i, rank_, 0);
    }
    parameters_[i]->publish(mean);
  }
}

int64_t Gradients::bucket_bytes() const {
  return layout_.world * segment() * static_cast<int64_t>(options_.dtype().itemsize());
}

} // namespace shardwise::group
