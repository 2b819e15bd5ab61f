#include "engine/unit.h"

#include "engine/backward_watch.h"

#include "group/compute_guard.h"
#include "observe/record.h"
#include "observe/seam.h"

#include <algorithm>

namespace shardwise::engine {
namespace {

/// Whether there is an axis of copies, be it of one rank.
bool has_copies(const Unit& unit) {
  return unit.replicates() || unit.mesh().ndim() == 2;
}

} // namespace

template <typename Do>
void Unit::for_gradients(const Do& act) {
  for (const auto& group : groups_) {
    if (auto* gradients = group->gradients()) act(*gradients);
  }
}

comm::Collectives Unit::in_order(const comm::Collectives& collectives) const {
  if (!agreement_ || collectives.size() == 1) return collectives;
  const bool first = &collectives == &copies_ && shards_.size() > 1;
  return collectives.at(agreement_->pass(first ? comm::Agreement::first_axis : comm::Agreement::group));
}

void Unit::gradient_arriving(group::Parameter& parameter, bool defined) {
  schedule_->gradient_arriving(*this, parameter, defined);
  if (!observe::recording()) return;
  // A direct call was not seen to end.
  forward_span_.reset();
  if (backward.missing > 0) begin(backward_span_, "backward");
}

void Unit::gradient_arrived(group::Parameter& parameter) {
  schedule_->gradient_arrived(*this, parameter);
  if (backward.missing == 0) backward_span_.reset();
}

void Unit::gradient_published(group::Parameter& parameter) {
  if (settings_.front && shards_.size() > 1) settings_.front->published(parameter.live_shard()->grad());
}

// A replicated unit may be used on some ranks only, so that it takes part whenever its tree does. A sharded one runs on
// all ranks or on none.
bool Unit::takes_part() const {
  return settings_.replicates || backward.engaged;
}

bool Unit::in_backward() {
  return BackwardWatch::running();
}

void Unit::reduce_pending() {
  schedule_->reduce_pending();
}

void Unit::take_leaf_gradients() {
  for (const auto& parameter : parameters_) parameter->take_leaf_gradient();
}

bool Unit::has_pending() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const auto& p) { return p->has_pending(); });
}

bool Unit::owes() const {
  return std::any_of(parameters_.begin(), parameters_.end(), [](const auto& p) { return p->owed; });
}

bool Unit::sums_late() const {
  return world() > 1 && (!agreement_ || !sums_apart());
}

void Unit::begin_reduce() {
  ++counters_.backwards;
  sums_ = !options.sync ? Sums::nothing : options.all_reduce || !has_copies(*this) ? Sums::all : Sums::shards;
  if (!options.sync || world() == 1) return;
  const auto has_gradients = [](const auto& group) { return group->gradients() != nullptr; };
  if (std::none_of(groups_.begin(), groups_.end(), has_gradients)) return;
  const auto& shards = sums_apart() ? shards_ : known_;
  const auto among_shards = shards_.size() > 1 ? in_order(shards).by(options.reduce_scatter) : shards_;
  const group::Gradients::Divisor divisor{
      .value = options.divide_factor.value_or(static_cast<double>(world())), .after = options.divide_after};
  for_gradients([&](auto& gradients) { gradients.begin(among_shards, divisor, buffers(), name_, counters_); });
  scattering_ = true;
  if (shards_.size() == 1) end_scatter();
}

// The second sums of all groups together, for in which order the first ones are done may differ between ranks.
void Unit::end_scatter() {
  if (!std::exchange(scattering_, false)) return;
  for_gradients([&](auto& gradients) { gradients.wait(buffers()); });
  if (sums_ != Sums::all || !has_copies(*this)) return;
  const auto among_copies = in_order(copies_);
  for_gradients([&](auto& gradients) { gradients.begin_all_reduce(among_copies, name_, counters_); });
}

bool Unit::advance_reduce() {
  bool done = true;
  const auto look = [&](const auto& gradients) { done = done && gradients.done(); };
  for_gradients(look);
  if (!done || !scattering_) return done;
  end_scatter();
  for_gradients(look);
  return done;
}

void Unit::wait_reduce() {
  end_scatter();
  for_gradients([&](auto& gradients) { gradients.wait(buffers()); });
}

void Unit::publish() {
  observe::pass(observe::Seam::publish);
  const auto sums = std::exchange(sums_, std::nullopt);
  if (!sums) return;
  if (sums == Sums::nothing) {
    for (const auto& parameter : parameters_) parameter->keep_for_later();
    for_gradients([](const auto& gradients) {
      for (auto* parameter : gradients.parameters()) parameter->owed = true;
    });
    return;
  }
  if (world() == 1) {
    const group::ComputeGuard guard;
    for (const auto& parameter : parameters_) {
      auto local = parameter->take_local();
      parameter->settle();
      if (!local.defined()) continue;
      if (options.divide_factor) local = local.div(*options.divide_factor);
      local = local.to(parameter->stored().scalar_type());
      // In the layout `flat` a shard is a vector.
      parameter->publish(parameter->whole ? local : local.reshape(parameter->stored().sizes()));
      parameter->run_hook();
    }
    return;
  }
  for_gradients([&](auto& gradients) {
    if (!gradients.under_way()) return;
    sums == Sums::all ? gradients.publish(options.all_reduce_hook) : gradients.keep_partial();
  });
}

// Sums that other ranks have started too run to their end.
void Unit::forget_backward() {
  try {
    end_scatter();
  } catch (const std::exception& error) {
    TORCH_WARN("shardwise: a sum that nobody wants any more failed: ", error.what());
  }
  sums_.reset();
  for (const auto& parameter : parameters_) parameter->forget_backward();
  for_gradients([&](auto& gradients) { gradients.drop(buffers()); });
}

} // namespace shardwise::engine
