#include "group/gradients.h"

#include "base/compute_guard.h"
#include "base/on_host.h"
#include "group/data.h"
#include "observe/label.h"
#include "observe/step_point.h"
#include "transport/transport.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/real.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace shardwise::group {
namespace {

/// Half precision overflows early, so part of the division comes before the sum: a power of two, about the square root.
double first_part(double divisor) {
  double part = 1;
  while (std::fmod(divisor, part) == 0 && divisor / part > part) part *= 2;
  return part;
}

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor;
}

} // namespace

Gradients::Gradients(std::vector<Parameter*> parameters, layout::Shards layout, at::ScalarType dtype, bool pin)
    : parameters_(std::move(parameters)),
      layout_(std::move(layout)),
      pin_(pin) {
  for (const auto* parameter : parameters_) {
    const auto leaf = parameter->full();
    options_ = leaf.options().dtype(dtype).requires_grad(false);
    // Whole gradients keep the memory format of their parameter, as autograd's do.
    strides_.push_back(
        !scattered() && leaf.is_non_overlapping_and_dense() ? c10::DimVector(leaf.strides())
                                                            : c10::contiguous_strides(leaf.sizes()));
  }
  segment_ = layout::with_counts(
      layout_, parameters_.size(), layout::alignment(static_cast<int64_t>(options_.dtype().itemsize())));
  for (const auto& cut : layout_.cuts) {
    auto& pieces = pieces_.emplace_back();
    for (int64_t rank = 0; rank < layout_.world; ++rank) {
      add_piece(pieces, {runs_of(cut, rank), rank * segment_ + cut.offsets[rank]});
    }
  }
}

at::Tensor Gradients::piece_in(const at::Tensor& buffer, size_t index, int64_t rank, int64_t start) const {
  const auto& cut = layout_.cuts[index];
  const auto offset = start + cut.offsets[rank];
  if (!scattered()) return view_of(buffer, parameters_[index]->full().sizes(), strides_[index], offset);
  const auto sizes = cut.piece_sizes(rank);
  return view_of(buffer, sizes, c10::contiguous_strides(sizes), offset);
}

// Gradients that are kept past zero_grad() are views of the sum, which is then not free: two sums take turns.
void Gradients::provide_result(const comm::Collectives* memory, Counters& counters) {
  const auto* owner = memory != nullptr ? memory->identity() : nullptr;
  if (std::exchange(owner_, owner) != owner) {
    sum_.renew({});
    spare_.renew({});
  }
  goes_to_host_ = !device().is_cpu() && parameters_.front()->stored().is_cpu();
  const auto is_free = [&](Sum& sum, Sum& spare) {
    if (sum.is_free(parameters_)) return true;
    std::swap(sum, spare);
    return sum.is_free(parameters_);
  };
  bool found = false;
  bool found_on_host = !goes_to_host_;
  const auto find_free = [&] {
    found = is_free(sum_, spare_);
    found_on_host = found_on_host || is_free(host_, host_spare_);
  };
  at_once([&] {
    for (const auto* parameter : parameters_) {
      if (converts_ && parameter->visible_parameter()) parameter->visible_parameter()->release();
    }
    find_free();
  });
  if (found) {
    sum_.wake();
  } else {
    if (memory != nullptr) {
      const auto bytes = segment_ * static_cast<int64_t>(options_.dtype().itemsize());
      sum_.renew(memory->allocate(bytes, device()).view(options_.dtype().toScalarType()));
    } else {
      sum_.renew(transport::shared_zeros(segment_, options_));
    }
    ++counters.allocations;
  }
  if (!found_on_host) {
    host_.renew(at::zeros({segment_}, published_kind().pinned_memory(pin_)));
    ++counters.allocations;
  }
}

void Gradients::at_once(c10::function_ref<void()> act) const {
  const auto& visible = parameters_.front()->visible_parameter();
  visible ? visible->at_once(act) : act();
}

void Gradients::rest() {
  // What a process group provides is registered with the network, and stays.
  if (owner_ != nullptr || under_way_ || is_open_ || !(sum_.may_rest() || spare_.may_rest())) return;
  at_once([&] {
    sum_.rest(parameters_);
    spare_.rest(parameters_);
  });
}

bool Gradients::move(size_t index, const at::Tensor& gradient, double scale) {
  if (!CopyBatch::takes(gradient) || !CopyBatch::scales(gradient.scalar_type(), bucket_.scalar_type()) ||
      gradient.device() != bucket_.device() || gradient.strides() != at::IntArrayRef(strides_[index]) ||
      gradient.is_neg()) {
    return false;
  }
  moves_.scale(gradient, pieces_[index], scale, bucket_);
  return true;
}

void Gradients::fill(size_t index, const at::Tensor& gradient, double scale) {
  if (gradient.defined() && move(index, gradient, scale)) return;
  const auto& cut = layout_.cuts[index];
  // With a plain number at::mul_out computes the product elsewhere and copies it.
  const auto factor = at::native::wrapped_scalar_tensor(scale);
  const auto put = [&](at::Tensor slot, const at::Tensor& part) {
    if (!part.defined()) {
      slot.zero_();
    } else if (part.dtype() == slot.dtype() && is_plain(part)) {
      at::mul_out(slot, part, factor);
    } else {
      slot.copy_(part);
      slot.mul_(factor);
    }
  };
  if (!scattered()) return put(piece_in(bucket_, index, 0, 0), gradient);
  const auto seen = gradient.defined() ? gradient.reshape(cut.shape) : at::Tensor();
  for (int64_t rank = 0; rank < layout_.world; ++rank) {
    if (cut.length(rank) == 0) continue;
    const auto part = seen.defined() ? seen.narrow(cut.dim, cut.starts[rank], cut.length(rank)) : seen;
    put(piece_in(bucket_, index, rank, rank * segment_), part);
  }
}

void Gradients::fill_counts() {
  if (bucket_.is_cpu() && put_flags(used_here_, bucket_, layout_.part, segment_)) return;
  // Nothing is copied from the host's memory: such a copy to a device makes the host wait.
  const auto n = static_cast<int64_t>(used_here_.size());
  const auto counts = bucket_.view({-1, segment_}).narrow(1, layout_.part, n);
  counts.fill_(1);
  for (int64_t i = 0; i < n; ++i) {
    if (!used_here_[i]) counts.select(1, i).zero_();
  }
}

// From here on a change of the rule applies to the next sum: what is in the bucket is already divided.
void Gradients::open(Rule rule, comm::Buffers& buffers, Counters& counters) {
  before_ = options_.dtype() == at::kHalf ? first_part(rule.divisor) : rule.divides_after ? 1 : rule.divisor;
  after_ = before_ / rule.divisor;
  counts_unused_ = rule.counts_unused;
  if (scattered()) {
    bucket_ = buffers.take(layout_.world * segment_, options_, counters, rule.memory);
  } else {
    provide_result(rule.memory, counters);
    bucket_ = sum_.vector();
  }
  taken_.assign(parameters_.size(), false);
  used_here_.assign(parameters_.size(), false);
  is_open_ = true;
}

void Gradients::take(size_t index, Counters& counters) {
  const auto local = parameters_[index]->take_local();
  fill(index, local, 1 / before_);
  taken_[index] = true;
  used_here_[index] = local.defined() || counts_unused_;
  if (local.defined()) counters.copied_bytes += static_cast<int64_t>(local.nbytes());
}

bool Gradients::take_large(bool is_next, Rule rule, comm::Buffers& buffers, Counters& counters) {
  if (under_way_ || (scattered() && !is_next)) return true;
  const base::ComputeGuard compute;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& fresh = parameters_[i]->fresh();
    if (!fresh.defined() || !moves_at_once(fresh.numel())) continue;
    if (!is_open_) open(rule, buffers, counters);
    filled_.await(bucket_);
    take(i, counters);
    moves_.run();
    filled_.note(bucket_);
  }
  return false;
}

// The memory of the result may be freed on the current stream.
Gradients::~Gradients() {
  if (under_way_) await_result();
}

void Gradients::begin(
    const comm::Collectives& shards, Rule rule, comm::Buffers& buffers, Streams* streams, const std::string& unit,
    Counters& counters) {
  const observe::Label label("FSDP::post_backward_reduce", unit);
  under_way_ = true;
  copying_ = false;
  observe::pass(observe::StepPoint::reduce);
  rank_ = scattered() ? shards.rank() : 0;
  const base::ComputeGuard compute;
  if (!is_open_) open(rule, buffers, counters);
  is_open_ = false;
  filled_.await(bucket_);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!taken_[i]) take(i, counters);
  }
  moves_.run();
  fill_counts();
  if (scattered()) provide_result(rule.memory, counters);
  std::optional<comm::SideStream::Scope> scope;
  if (streams != nullptr) {
    streams->shards.follow_current(device());
    scope.emplace(streams->shards, device());
  }
  if (scattered()) {
    pending_ =
        shards.reduce_scatter(as_real(sum_.vector()), as_real(bucket_), named("the reduce-scatter", unit), counters);
  } else if (shards.size() > 1) {
    pending_ = shards.all_reduce(as_real(sum_.vector()), named("the all-reduce", unit), counters);
  }
  if (streams == nullptr) return;
  wait_in_stream();
  if (scattered()) bucket_use_ = buffers.note(bucket_);
}

// Refers to this object and to `unit`: it is only called while the sum is started or waited for, when both exist.
comm::CollectiveName Gradients::named(const char* sum, const std::string& unit) const {
  return [this, &unit, sum] {
    return c10::str(
        sum, " of the gradients of unit '", unit, "' (", parameters_.front()->name(), " and ", parameters_.size() - 1,
        " more parameters)");
  };
}

void Gradients::wait_in_stream() {
  if (auto pending = std::exchange(pending_, std::nullopt)) {
    observe::pass(observe::StepPoint::reduced);
    pending->wait();
  }
  result_.note(sum_.vector());
}

void Gradients::await_result() {
  if (sum_.vector().defined()) result_.await(sum_.vector());
}

void Gradients::begin_all_reduce(
    const comm::Collectives& copies, Streams* streams, const std::string& unit, Counters& counters) {
  observe::pass(observe::StepPoint::all_reduce);
  std::optional<comm::SideStream::Scope> scope;
  if (streams != nullptr) {
    streams->copies.follow(streams->shards, device());
    scope.emplace(streams->copies, device());
  }
  const base::ComputeGuard compute;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& partial = parameters_[i]->partial;
    if (!partial.values.defined()) continue;
    piece_in(sum_.vector(), i, rank_, 0).add_(partial.values);
    count_of(i).add_(partial.count);
  }
  if (copies.size() > 1) {
    pending_ = copies.all_reduce(as_real(sum_.vector()), named("the all-reduce", unit), counters);
  }
  if (streams != nullptr) wait_in_stream();
}

at::Tensor Gradients::count_of(size_t index) const {
  return sum_.vector().narrow(0, layout_.part + static_cast<int64_t>(index), 1);
}

// What is kept are views of this vector. The next sum gets another one, so nothing is copied.
void Gradients::keep_partial() {
  under_way_ = false;
  const base::ComputeGuard guard;
  await_result();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& parameter = *parameters_[i];
    parameter.mark_averaged();
    if (parameter.partial.values.defined()) {
      parameter.partial.values.add_(piece_in(sum_.vector(), i, rank_, 0));
      parameter.partial.count.add_(count_of(i));
    } else {
      parameter.partial = {piece_in(sum_.vector(), i, rank_, 0), count_of(i)};
    }
  }
}

void Gradients::wait(comm::Buffers& buffers) {
  if (bucket_use_) return give_bucket(buffers);
  if (!pending_) return;
  observe::pass(observe::StepPoint::reduced);
  auto pending = std::move(*pending_);
  pending_.reset();
  pending.wait();
  const base::ComputeGuard guard;
  const auto bucket = std::exchange(bucket_, at::Tensor());
  if (scattered()) buffers.give(bucket);
}

void Gradients::give_bucket(comm::Buffers& buffers) {
  buffers.give(std::exchange(bucket_, at::Tensor()), *std::exchange(bucket_use_, std::nullopt));
}

void Gradients::drop(comm::Buffers& buffers) {
  if (std::exchange(is_open_, false)) {
    filled_.await(bucket_);
    const auto bucket = std::exchange(bucket_, at::Tensor());
    if (scattered()) buffers.give(bucket);
  }
  if (!under_way_) return;
  under_way_ = false;
  await_result();
  if (bucket_use_) give_bucket(buffers);
  auto pending = std::exchange(pending_, std::nullopt);
  const auto bucket = std::exchange(bucket_, at::Tensor());
  if (!pending) return;
  // A sum that failed may still write to its memory, so the memory does not go back to the pool.
  if (!pending->wait_noexcept()) {
    sum_.renew({});
  } else if (scattered()) {
    const base::ComputeGuard guard;
    buffers.give(bucket);
  }
}

int64_t Gradients::bucket_bytes() const {
  return layout_.world * segment_ * static_cast<int64_t>(options_.dtype().itemsize());
}

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

// Copies to unpinned memory are left to publish(): the host would wait here, in the middle of the backward.
void Gradients::begin_copies(bool is_final, comm::HostCopies& to_host) {
  const base::ComputeGuard guard;
  if (goes_to_host_) {
    if (is_final && pin_) copy_to_host(to_host);
  } else if (has_unused()) {
    copy_counts(/*pinned=*/true, to_host);
  }
}

void Gradients::check_offload(const Parameter& parameter, at::Device device) {
  const auto what = [&] {
    return c10::str("take the gradient of '", parameter.name(), "' to its memory (cpu_offload)");
  };
  comm::need_no_capture(device, what, "Leave the backward out of the graph, or shard without cpu_offload.");
}

// The whole vector in one copy, with the counts.
void Gradients::copy_to_host(comm::HostCopies& to_host) {
  check_offload(*parameters_.front(), device());
  copying_ = true;
  to_host.begin(sum_.vector(), result_, !pin_, [&] {
    if (after_ != 1) sum_.vector().narrow(0, 0, layout_.part).mul_(std::exchange(after_, 1));
    host_.vector().copy_(sum_.vector(), /*non_blocking=*/pin_);
  });
}

void Gradients::copy_counts(bool pinned, comm::HostCopies& to_host) {
  const auto what = [&] {
    const auto unused = std::find(used_here_.begin(), used_here_.end(), false) - used_here_.begin();
    return c10::str(
        "learn whether other ranks used the parameter '", parameters_[unused]->name(),
        "', which got no gradient on this rank");
  };
  comm::need_no_capture(
      device(), what,
      "Use every parameter on every rank, freeze those that are not used, call "
      "set_reduce_scatter_unused_params(true), or leave the backward out of the graph.");
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
  used.reserve(parameters_.size());
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
    return !scattered() && sizes == parameter.live_full().sizes() ? strides_[index] : c10::contiguous_strides(sizes);
  });
}

// A hook may read what is between gradients, for example for a norm.
void Gradients::clear_gaps(const at::Tensor& sum) const {
  int64_t end = 0;
  const auto clear_to = [&](int64_t next) {
    if (next > end) sum.narrow(0, end, next - end).zero_();
  };
  for (const auto& cut : layout_.cuts) {
    clear_to(cut.offsets[rank_]);
    end = cut.offsets[rank_] + cut.piece_numel(rank_);
  }
  clear_to(layout_.part);
}

void Gradients::publish(comm::HostCopies& to_host, const std::function<void(at::Tensor&)>& hook) {
  under_way_ = false;
  await_result();
  if (hook) {
    auto sum = sum_.vector().detach().narrow(0, 0, layout_.part);
    clear_gaps(sum);
    hook(sum);
    // If the hook was set after the copy began, the copy is out of date.
    copying_ = copying_ && !goes_to_host_;
  }
  for (auto* parameter : parameters_) {
    parameter->mark_averaged();
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
  at_once(publish_all);
}

} // namespace shardwise::group
