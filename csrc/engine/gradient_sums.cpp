#include "engine/gradient_sums.h"

#include "base/compute_guard.h"
#include "engine/unit.h"
#include "observe/step_point.h"

#include <shardwise/error.h>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace shardwise::engine {
namespace {

/// Whether there is an axis of ranks that hold copies, even one of a single rank.
bool has_copies(const Unit& unit) {
  return unit.replicates() || unit.mesh().ndim() == 2;
}

template <typename Is>
bool any_parameter(const Unit& unit, const Is& is) {
  return std::any_of(unit.parameters().begin(), unit.parameters().end(), is);
}

} // namespace

/// Calls `act` with the gradients of each group that has trained parameters.
template <typename Do>
void GradientSums::for_each(const Do& act) {
  for (const auto& group : unit_.groups()) {
    if (auto* gradients = group->gradients()) act(*gradients);
  }
}

bool GradientSums::share_group() const {
  return unit_.ranks().sums_share_group(unit_.options.custom_collectives);
}

void GradientSums::prepare() {
  const auto& options = unit_.options;
  planned_ = !options.sync ? Extent::nothing : options.all_reduce || !has_copies(unit_) ? Extent::all : Extent::shards;
  for (const auto& parameter : unit_.parameters()) parameter->take_leaf_gradient();
}

bool GradientSums::has_pending() const {
  return any_parameter(unit_, [](const auto& parameter) { return parameter->has_pending(); });
}

bool GradientSums::are_owed() const {
  return any_parameter(unit_, [](const auto& parameter) { return parameter->owed; });
}

void GradientSums::need_nothing_left() const {
  for (const auto& parameter : unit_.parameters()) {
    if (!parameter->fresh().defined() && !parameter->has_inside()) continue;
    throw Error(c10::str(
        "shardwise: the gradient of '", parameter->name(), "' on rank ", unit_.mesh().rank(),
        " was computed in this backward, but is in no sum. This is a bug in shardwise: please report it with this "
        "text."));
  }
}

group::Gradients::Rule GradientSums::rule() const {
  const auto& options = unit_.options;
  return {
      .divisor = options.divide_factor.value_or(static_cast<double>(unit_.ranks().world())),
      .divides_after = options.divide_after,
      .counts_unused = options.counts_unused,
      .memory = unit_.ranks().memory_of_sums(options.custom_collectives)};
}

void GradientSums::rest() {
  if (!extent_) for_each([](auto& gradients) { gradients.rest(); });
}

bool GradientSums::has_large(const group::Parameter& arrived) {
  const auto& fresh = arrived.fresh();
  large_waits_ = large_waits_ || (fresh.defined() && group::Gradients::moves_at_once(fresh.numel()));
  return large_waits_;
}

void GradientSums::take_large(bool is_next) {
  if (extent_ || planned_ == Extent::nothing || unit_.ranks().world() == 1) return;
  const auto given = rule();
  large_waits_ = false;
  for_each([&](auto& gradients) {
    const bool waits = gradients.take_large(is_next, given, unit_.buffers(), unit_.own_counters());
    large_waits_ = large_waits_ || waits;
  });
}

void GradientSums::turn_to_inside() {
  for (const auto& parameter : unit_.parameters()) parameter->turn_to_inside();
}

void GradientSums::begin() {
  const auto& options = unit_.options;
  auto& counters = unit_.own_counters();
  ++counters.backwards;
  extent_ = planned_;
  large_waits_ = false;
  if (extent_ == Extent::nothing || unit_.ranks().world() == 1) return;
  const auto has_gradients = [](const auto& group) { return group->gradients() != nullptr; };
  if (std::none_of(unit_.groups().begin(), unit_.groups().end(), has_gradients)) return;
  const auto among_shards = unit_.ranks().for_first_sum(options.custom_collectives);
  const auto given = rule();
  in_stream_ = unit_.timing().sums_in_stream;
  for_each([&](auto& gradients) {
    gradients.begin(among_shards, given, unit_.buffers(), streams(), unit_.name(), counters);
  });
  scattering_ = true;
  if (in_stream_) {
    begin_second();
    begin_copies();
  } else if (among_shards.size() == 1) {
    finish_first();
  }
}

group::Gradients::Streams* GradientSums::streams() const {
  return in_stream_ ? &unit_.schedule()->sum_streams() : nullptr;
}

void GradientSums::finish_first() {
  if (!std::exchange(scattering_, false)) return;
  for_each([&](auto& gradients) { gradients.wait(unit_.buffers()); });
  if (!in_stream_) begin_second();
}

// The second sums of all groups start together: the order in which the first ones are done may differ between ranks.
void GradientSums::begin_second() {
  if (extent_ != Extent::all || !has_copies(unit_)) return;
  const auto among_copies = unit_.ranks().for_second_sum();
  for_each([&](auto& gradients) {
    gradients.begin_all_reduce(among_copies, streams(), unit_.name(), unit_.own_counters());
  });
}

// A hook may change the sum first.
void GradientSums::begin_copies() {
  if (extent_ != Extent::all) return;
  const bool is_final = !unit_.options.all_reduce_hook;
  for_each([&](auto& gradients) { gradients.begin_copies(is_final, to_host()); });
}

comm::HostCopies& GradientSums::to_host() const {
  return unit_.schedule()->sum_streams().to_host;
}

bool GradientSums::advance() {
  if (in_stream_) return true;
  bool done = true;
  const auto look = [&](const auto& gradients) { done = done && gradients.done(); };
  for_each(look);
  if (!done || !scattering_) return done;
  finish_first();
  for_each(look);
  return done;
}

void GradientSums::wait() {
  finish_first();
  for_each([&](auto& gradients) { gradients.wait(unit_.buffers()); });
}

void GradientSums::publish() {
  observe::pass(observe::StepPoint::publish);
  const auto extent = std::exchange(extent_, std::nullopt);
  if (!extent) return;
  if (extent == Extent::nothing) {
    for (const auto& parameter : unit_.parameters()) {
      parameter->keep_for_later();
      parameter->show_pending();
    }
    for_each([](const auto& gradients) {
      for (auto* parameter : gradients.parameters()) parameter->owed = true;
    });
    return;
  }
  if (unit_.ranks().world() == 1) return publish_alone();
  for_each([&](auto& gradients) {
    if (!gradients.under_way()) return;
    extent == Extent::all ? gradients.publish(to_host(), unit_.options.all_reduce_hook) : gradients.keep_partial();
  });
}

at::Tensor GradientSums::as_published(const group::Parameter& parameter, const at::Tensor& mean) const {
  const auto stored = parameter.stored();
  const auto dtype = parameter.grad_dtype.value_or(stored.scalar_type());
  if (stored.device() == mean.device()) return mean.to(dtype);
  if (stored.is_cpu()) group::Gradients::check_offload(parameter, mean.device());
  const bool pin = unit_.pins() && stored.is_cpu();
  const auto moved = at::empty_like(mean, stored.options().dtype(dtype).requires_grad(false).pinned_memory(pin));
  comm::LastUse use;
  use.note(mean);
  to_host().begin(mean, use, !pin, [&] { moved.copy_(mean, /*non_blocking=*/pin); });
  use.tell_allocator(mean);
  return moved;
}

void GradientSums::publish_alone() {
  const base::ComputeGuard guard;
  const auto& factor = unit_.options.divide_factor;
  std::vector<std::pair<group::Parameter*, at::Tensor>> means;
  for (const auto& parameter : unit_.parameters()) {
    auto local = parameter->take_local();
    parameter->mark_averaged();
    if (!local.defined() && unit_.options.counts_unused && parameter->requires_grad()) {
      local = at::zeros_like(parameter->stored());
    }
    if (!local.defined()) continue;
    if (factor) local = local.div(*factor);
    means.emplace_back(parameter.get(), as_published(*parameter, local));
  }
  to_host().wait();
  for (const auto& [parameter, mean] : means) {
    // In the layout `flat` a shard is one-dimensional.
    parameter->publish(parameter->whole ? mean : mean.reshape(parameter->stored().sizes()));
  }
}

void GradientSums::run_hooks() {
  for (const auto& parameter : unit_.parameters()) parameter->run_hook();
}

void GradientSums::forget_hooks() {
  for (const auto& parameter : unit_.parameters()) parameter->forget_hook();
}

// Sums that are under way are finished, since other ranks take part in them.
void GradientSums::forget() {
  try {
    finish_first();
  } catch (const std::exception& error) {
    TORCH_WARN("shardwise: while a failed backward was cleaned up, a sum of its gradients failed too: ", error.what());
  }
  extent_.reset();
  large_waits_ = false;
  for (const auto& parameter : unit_.parameters()) parameter->forget_backward();
  for_each([&](auto& gradients) { gradients.drop(unit_.buffers()); });
}

void GradientSums::forget_accumulated() {
  for (const auto& parameter : unit_.parameters()) {
    parameter->hide_pending();
    parameter->mark_averaged();
    parameter->partial = {};
  }
}

} // namespace shardwise::engine
