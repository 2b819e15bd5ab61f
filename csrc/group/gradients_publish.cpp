#include "base/compute_guard.h"
#include "base/on_host.h"
#include "group/gradients.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/real.h>

#include <algorithm>
#include <utility>

namespace shardwise::group {

at::TensorOptions Gradients::published_kind() const {
  const auto& first = *parameters_.front();
  const auto kind = first.stored().options().requires_grad(false);
  return first.grad_dtype ? kind.dtype(first.grad_dtype) : kind;
}

bool Gradients::has_unused() const {
  return std::find(used_here_.begin(), used_here_.end(), false) != used_here_.end();
}

at::Tensor Gradients::counts_in(const at::Tensor& sum) const {
  return at::real(sum.narrow(0, layout_.part, static_cast<int64_t>(parameters_.size())));
}

// Memory that is not pinned is left to publish(): the host would wait here, in the middle of the backward.
void Gradients::begin_copies(bool is_final, comm::HostCopies& to_host) {
  const base::ComputeGuard guard;
  if (goes_to_host_) {
    if (is_final && pin_) copy_to_host(to_host);
  } else if (has_unused()) {
    copy_counts(/*pinned=*/true, to_host);
  }
}

// The whole vector in one copy, with the counts.
void Gradients::copy_to_host(comm::HostCopies& to_host) {
  copying_ = true;
  to_host.begin(sum_.vector(), result_, !pin_, [&] {
    if (after_ != 1) sum_.vector().narrow(0, 0, layout_.part).mul_(std::exchange(after_, 1));
    host_.vector().copy_(sum_.vector(), /*non_blocking=*/pin_);
  });
}

void Gradients::copy_counts(bool pinned, comm::HostCopies& to_host) {
  copying_ = true;
  const auto n = static_cast<int64_t>(parameters_.size());
  host_counts_ = at::empty({n}, base::on_host(at::kFloat).pinned_memory(pinned));
  to_host.begin(
      sum_.vector(), result_, !pinned, [&] { host_counts_.copy_(counts_in(sum_.vector()), /*non_blocking=*/pinned); });
}

// Only a rank that left a parameter unused has to look at the counts.
std::vector<size_t> Gradients::used_somewhere() const {
  at::Tensor counts;
  if (has_unused()) {
    const base::ComputeGuard guard;
    counts = goes_to_host_ ? counts_in(host_.vector()).to(at::kFloat) : host_counts_;
  }
  std::vector<size_t> used;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (used_here_[i] || counts.data_ptr<float>()[i] != 0) used.push_back(i);
  }
  return used;
}

// A mean has the sizes of its shard, and if those are the parameter's, its strides too. In the layout `flat` a shard is
// a vector, even if one rank has all of it.
const at::Tensor& Gradients::mean_of(size_t index) {
  auto& sum = goes_to_host_ ? host_ : sum_;
  const auto& parameter = *parameters_[index];
  const auto offset = layout_.cuts[index].offsets[rank_];
  const auto* shard = parameter.live_shard();
  if (shard == nullptr) {
    return sum.view(index, parameter.live_full().sizes(), offset, [&] { return strides_[index]; });
  }
  const auto sizes = shard->sizes();
  return sum.view(index, sizes, offset, [&] {
    return !scattered() && sizes == parameter.live_full().sizes() ? strides_[index] : row_major(sizes);
  });
}

void Gradients::publish(comm::HostCopies& to_host, const std::function<void(at::Tensor&)>& hook) {
  under_way_ = false;
  await_result();
  if (hook) {
    auto sum = sum_.vector().detach().narrow(0, 0, layout_.part);
    hook(sum);
    // Of one that was set when the copy was on its way already.
    copying_ = copying_ && !goes_to_host_;
  }
  for (auto* parameter : parameters_) {
    parameter->settle();
    parameter->partial = {};
  }
  if (!copying_ && (goes_to_host_ || has_unused())) {
    const base::ComputeGuard guard;
    result_.note(sum_.vector());
    goes_to_host_ ? copy_to_host(to_host) : copy_counts(/*pinned=*/false, to_host);
  }
  if (std::exchange(copying_, false)) to_host.wait();
  const auto used = used_somewhere();
  host_counts_ = at::Tensor();
  const auto& source = goes_to_host_ ? host_.vector() : sum_.vector();
  const auto kind = published_kind();
  converts_ = kind.dtype() != source.dtype() || kind.device() != source.device();
  std::vector<at::Tensor> converted;
  if (after_ != 1 || converts_) {
    const base::ComputeGuard guard;
    for (const auto i : used) {
      auto mean = mean_of(i);
      if (after_ != 1) mean.mul_(after_);
      if (converts_) converted.push_back(mean.to(kind));
    }
  }
  const auto publish_all = [&] {
    for (size_t n = 0; n < used.size(); ++n) {
      parameters_[used[n]]->publish(converts_ ? converted[n] : mean_of(used[n]));
    }
  };
  const auto& visible = parameters_.front()->visible_parameter();
  visible ? visible->at_once(publish_all) : publish_all();
}

} // namespace shardwise::group
