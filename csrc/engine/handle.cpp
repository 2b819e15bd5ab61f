#include "engine/unit.h"

#include <shardwise/error.h>
#include <shardwise/unit.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>

#include <cmath>
#include <utility>

namespace shardwise {
namespace {

template <typename Set>
void for_units(engine::Unit& unit, bool recurse, const Set& set) {
  for (const auto& each : recurse ? unit.tree() : unit.call()) set(*each);
}

/// The user's own collectives allocate as they like, so they do not work with memory of the process groups.
template <typename Change>
void change_custom_collectives(engine::Unit& unit, const Change& change) {
  for (const auto& each : unit.call()) {
    auto custom_collectives = each->options.custom_collectives;
    change(*each, custom_collectives);
    if (custom_collectives.in_own_memory && (custom_collectives.all_gather || custom_collectives.reduce_scatter)) {
      throw ValueError(c10::str(
          "shardwise: unit '", unit.name(),
          "' cannot combine memory of the process group with a custom all-gather or reduce-scatter, which may allocate "
          "its own. Choose one of the two."));
    }
    each->options.custom_collectives = std::move(custom_collectives);
  }
}

} // namespace

std::vector<int64_t> whole_sizes(const at::Tensor& parameter) {
  const auto unit = engine::unit_of_shard(parameter);
  const auto* known = unit ? unit->parameter_of_shard(parameter) : nullptr;
  return (known != nullptr ? known->live_full().sizes() : parameter.sizes()).vec();
}

void UnshardHandle::wait() {
  const auto unit = unit_.lock();
  if (!unit) return;
  for (const auto& each : unit->call()) each->finish_unshard();
}

void GradientReductionHandle::wait() {
  if (const auto unit = std::exchange(unit_, {}).lock()) unit->schedule()->wait_for_finalization(number_);
}

Unit::Unit(std::shared_ptr<engine::Unit> unit) : unit_(std::move(unit)) {}

const std::string& Unit::name() const {
  return unit_->name();
}

Unit& Unit::set_requires_gradient_sync(bool value, bool recurse) {
  for_units(*unit_, recurse, [&](engine::Unit& unit) {
    unit.options.sync = value;
    for (const auto& parameter : unit.parameters()) parameter->set_sync(value);
  });
  return *this;
}

Unit& Unit::set_manual_backward_finalization(bool value) {
  unit_->schedule()->set_finalized_by_hand(value);
  return *this;
}

GradientReductionHandle Unit::finalize_backward(bool async) {
  GradientReductionHandle reduction(unit_, unit_->schedule()->finalize());
  if (!async) reduction.wait();
  return reduction;
}

Unit& Unit::set_reduce_scatter_unused_params(bool value, bool recurse) {
  for_units(*unit_, recurse, [&](engine::Unit& unit) {
    unit.options.counts_unused = value;
    unit.timing().always_sums = value || unit.replicates();
  });
  return *this;
}

Unit& Unit::set_reduce_scatter_max_input_buffers(int64_t count, bool recurse) {
  if (count < 1) throw ValueError(c10::str("shardwise: max_input_buffers must be a positive int, got ", count, "."));
  for_units(*unit_, recurse, [&](engine::Unit& unit) { unit.timing().sums_in_flight = static_cast<size_t>(count); });
  return *this;
}

Unit& Unit::set_requires_all_reduce(bool value, bool recurse) {
  for_units(*unit_, recurse, [&](engine::Unit& unit) { unit.options.all_reduce = value; });
  return *this;
}

Unit& Unit::set_gradient_divide_factor(double factor) {
  if (!(factor > 0) || !std::isfinite(factor)) {
    throw ValueError(c10::str(
        "shardwise: the gradient divide factor of unit '", name(), "' is ", factor,
        "; it must be a number above 0. The number of ranks gives the mean, 1 gives the sum."));
  }
  for (const auto& unit : unit_->call()) unit->options.divide_factor = factor;
  return *this;
}

Unit& Unit::set_force_sum_reduction(bool value) {
  for (const auto& unit : unit_->call()) unit->options.divide_after = value;
  return *this;
}

Unit& Unit::set_all_reduce_hook(const std::function<void(at::Tensor& sum)>& hook) {
  for (const auto& unit : unit_->call()) unit->options.all_reduce_hook = hook;
  return *this;
}

Unit& Unit::set_custom_all_gather(const CustomCollective& collective) {
  change_custom_collectives(
      *unit_, [&](const auto&, auto& custom_collectives) { custom_collectives.all_gather = collective; });
  return *this;
}

Unit& Unit::set_custom_reduce_scatter(const CustomCollective& collective) {
  change_custom_collectives(
      *unit_, [&](const auto&, auto& custom_collectives) { custom_collectives.reduce_scatter = collective; });
  return *this;
}

Unit& Unit::set_memory_from_process_group(bool value) {
  change_custom_collectives(*unit_, [&](const engine::Unit& unit, auto& custom_collectives) {
    if (value) unit.ranks().require_memory(unit.device());
    custom_collectives.in_own_memory = value;
  });
  return *this;
}

bool Unit::requires_gradient_sync() const {
  return unit_->options.sync;
}

UnshardHandle Unit::unshard(bool async) {
  for (const auto& unit : unit_->call()) unit->schedule()->begin_unshard_by_hand(*unit);
  UnshardHandle unsharding(unit_);
  if (!async) unsharding.wait();
  return unsharding;
}

Unit& Unit::reshard() {
  for (const auto& unit : unit_->call()) unit->reshard();
  return *this;
}

Unit& Unit::set_reshard_after_forward(bool value, bool recurse) {
  for_units(*unit_, recurse, [&](engine::Unit& unit) { unit.timing().reshard_after_forward = value; });
  return *this;
}

Unit& Unit::set_reshard_after_backward(bool value, bool recurse) {
  for_units(*unit_, recurse, [&](engine::Unit& unit) { unit.timing().reshard_after_backward = value; });
  return *this;
}

Unit& Unit::set_keep_unsharded_storage(bool value, bool recurse) {
  for_units(*unit_, recurse, [&](engine::Unit& unit) { unit.options.keeps_storage = value; });
  return *this;
}

Unit& Unit::set_unshard_in_backward(bool value) {
  for (const auto& unit : unit_->call()) unit->set_unshard_in_backward(value);
  return *this;
}

std::vector<std::weak_ptr<engine::Unit>> Unit::calls_of(const std::vector<Unit>& units) {
  std::vector<std::weak_ptr<engine::Unit>> all;
  for (const auto& handle : units) {
    for (const auto& unit : handle.unit_->call()) all.emplace_back(unit);
  }
  return all;
}

Unit& Unit::set_forward_prefetch(const std::vector<Unit>& units) {
  unit_->options.forward_prefetch = calls_of(units);
  unit_->timing().has_forward_list = !units.empty();
  return *this;
}

Unit& Unit::set_backward_prefetch(const std::vector<Unit>& units) {
  unit_->options.backward_prefetch = calls_of(units);
  unit_->timing().has_backward_list = !units.empty();
  return *this;
}

Unit& Unit::set_prefetch(bool value) {
  unit_->schedule()->order().prefetches = value;
  return *this;
}

Unit& Unit::set_post_optim_event(std::shared_ptr<c10::Event> event) {
  if (!event || unit_->device().is_cpu()) return *this;
  unit_->schedule()->await_event = [event = std::move(event), device = unit_->device()] {
    const c10::impl::VirtualGuardImpl guard(device.type());
    event->block(guard.getStream(device));
  };
  return *this;
}

Unit& Unit::free_idle_memory() {
  unit_->buffers().free_idle();
  return *this;
}

Unit& Unit::reset() {
  unit_->schedule()->reset();
  return *this;
}

Unit& Unit::reset_iter_state() {
  unit_->schedule()->reset_iteration();
  return *this;
}

void share_comm_context(const std::vector<Unit>& units) {
  for (const auto& unit : units) unit.unit_->schedule()->share_buffers(*units.front().unit_->schedule());
}

Plan Unit::plan() const {
  return unit_->plan();
}

Counters Unit::counters() const {
  return unit_->counters();
}

} // namespace shardwise
