#include "engine/order.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace shardwise::engine {

void Order::begin_backward(int backward, OrderActions& act) {
  last_.reset();
  settle(act);
  if (!in_forward()) end_forwards();
  backward_ = backward;
  launched_ = 0;
  reached_ = false;
  late_ = false;
  most_in_flight_ = 1;
  sums_in_stream_ = false;
  for (const auto unit : sums_) {
    auto& node = units_[unit];
    most_in_flight_ = std::max(most_in_flight_, node.timing.sums_in_flight);
    sums_in_stream_ = sums_in_stream_ || is_seen_in_backward(node.head);
    node.uses_to_come = node.uses;
    // Several forwards may lie behind one backward, or each have one of its own, in any order.
    node.uses_before_sum = std::max(node.uses, std::exchange(node.uses_since, 0));
    node.used_in_backward = false;
    node.missing = 0;
    std::fill(node.awaited.begin(), node.awaited.end(), false);
    node.sums = takes_part(unit);
    node.reached_inside = false;
  }
}

void Order::expect(UnitId unit, size_t parameter) {
  auto& node = units_[unit];
  if (node.awaited.size() <= parameter) node.awaited.resize(parameter + 1);
  node.awaited[parameter] = true;
  ++node.missing;
  engage(unit);
}

std::vector<UnitId> Order::reached_inside() const {
  std::vector<UnitId> units;
  std::copy_if(
      sums_.begin(), sums_.end(), std::back_inserter(units), [&](UnitId unit) { return units_[unit].reached_inside; });
  return units;
}

bool Order::takes_part(UnitId unit) const {
  return units_[unit].timing.always_sums || units_[unit].engaged;
}

void Order::note(UnitId unit, size_t parameter, Moment moment) {
  auto& node = units_[unit];
  if (backward_ != moment.backward || parameter >= node.awaited.size() || !node.awaited[parameter]) return;
  node.awaited[parameter] = false;
  --node.missing;
}

void Order::gradient_arrived(UnitId unit, size_t parameter, Moment moment, OrderActions& act) {
  reached_ = true;
  (moment.backward == backward_ ? units_[unit].engaged : units_[unit].reached_inside) = true;
  note(unit, parameter, moment);
  advance(moment, act);
}

// Late sums wait for the end of the backward: those that share a process group with the sums of another tree, or with
// all-gathers, unless they start where all ranks do alike. Gradients become ready at different times on different
// ranks, so the order of collectives on that group would differ too. For the same reason nothing waits for a sum here:
// the ranks that it needs may be waiting for a gather that this rank comes to later.
void Order::advance(Moment moment, OrderActions& act) {
  if (backward_ != moment.backward) return;
  start_sums([&] { return has_room(act); }, act);
}

// Second sums start in the order of first ones, so no sum is looked at before those in front of it are done.
bool Order::has_room(OrderActions& act) {
  const auto is_done = [&](UnitId unit) { return act.sum_is_done(unit); };
  const auto busy = std::find_if_not(in_flight_.begin(), in_flight_.end(), is_done);
  return in_flight_.size() < most_in_flight_ || busy != in_flight_.begin();
}

template <typename Condition>
void Order::start_sums(const Condition& may_start, OrderActions& act) {
  if (!in_backward() || !reached_ || late_) return;
  for (; launched_ < sums_.size(); ++launched_) {
    // may_start() is asked first: it also starts the second part of the sum before, which takes time too.
    if (!may_start() || units_[sums_[launched_]].missing > 0 || !is_over(sums_[launched_])) return;
    if (units_[sums_[launched_]].sums) launch(sums_[launched_], act);
  }
}

// In a stream, only a unit that each backward gathers is seen to be over on all ranks alike; one inside of it is with
// it.
bool Order::is_seen_in_backward(UnitId head) const {
  const auto& timing = units_[head].timing;
  return timing.sums_in_stream && timing.unshard_in_backward && is_gathered(head);
}

// Whether this backward will come to the unit is not known: where a rank expects none of its gradients, others may. One
// that was used in forward and is never come to holds all that follow up to the end.
bool Order::is_over(UnitId unit) const {
  if (!sums_in_stream_ || !units_[unit].sums) return true;
  const auto seen_in = [&]() -> std::optional<UnitId> {
    for (std::optional<UnitId> one = units_[unit].head; one; one = units_[*one].outer) {
      if (is_seen_in_backward(units_[*one].head)) return units_[*one].head;
    }
    return std::nullopt;
  }();
  if (!seen_in) return false;
  const auto& seen = units_[*seen_in];
  if (*seen_in == units_[unit].head && !seen.engaged) return true;
  const bool is_open = std::find(open_.begin(), open_.end(), *seen_in) != open_.end();
  return !is_open && seen.used_in_backward && seen.uses_before_sum <= 0;
}

void Order::launch(UnitId unit, OrderActions& act) {
  while (in_flight_.size() >= most_in_flight_) {
    act.wait_sum(in_flight_.front());
    in_flight_.erase(in_flight_.begin());
  }
  in_flight_.push_back(unit);
  act.start_sum(unit);
}

void Order::end_backward(bool publishes, OrderActions& act) {
  try {
    for (; launched_ < sums_.size(); ++launched_) {
      if (units_[sums_[launched_]].sums) launch(sums_[launched_], act);
    }
    for (const auto unit : in_flight_) publishes ? act.wait_sum(unit) : act.finish_first_sum(unit);
    if (publishes) in_flight_.clear();
  } catch (...) {
    forget_backward(act);
    throw;
  }
  backwards_.end_pass();
  unsettled_ = sums_;
  backward_ = kNone;
  free_all(act);
  for (const auto unit : unsettled_) {
    units_[unit].entered = false;
    units_[unit].engaged = false;
    units_[unit].missing = 0;
  }
  if (publishes) settle(act);
}

void Order::begin_pending(OrderActions& act) {
  settle(act);
  launched_ = 0;
  for (const auto unit : sums_) units_[unit].sums = takes_part(unit);
}

void Order::begin_pending(const std::vector<UnitId>& units, OrderActions& act) {
  settle(act);
  launched_ = 0;
  for (const auto unit : sums_) units_[unit].sums = false;
  for (const auto unit : units) {
    units_[unit].reached_inside = false;
    engage(unit);
  }
}

void Order::settle(OrderActions& act) {
  const auto units = std::exchange(unsettled_, {});
  if (units.empty()) return;
  for (const auto unit : std::exchange(in_flight_, {})) act.wait_sum(unit);
  for (const auto unit : units) {
    if (units_[unit].alive) act.publish(unit, /*is_last=*/!units_[unit].reached_inside);
  }
}

// Otherwise a sum starts once the one before it is done, and when that is differs between ranks. Where a backward dies
// on all ranks, every sum that all ranks can start is started, whatever is still under way.
void Order::start_what_can(OrderActions& act) {
  start_sums([] { return true; }, act);
}

void Order::forget_backward(OrderActions& act) {
  backwards_.forget_pass();
  in_flight_.clear();
  backward_ = kNone;
  const auto made = made_;
  for (const auto unit : made) {
    units_[unit].entered = false;
    units_[unit].missing = 0;
    act.forget_backward(unit);
  }
  free_all(act);
}

} // namespace shardwise::engine
