#include "engine/order.h"

#include <algorithm>
#include <utility>

namespace shardwise::engine {

using Kind = Action::Kind;

UnitId Order::add(int64_t number, const UnitTiming& timing, std::optional<UnitId> outer) {
  units_.push_back({.number = number, .outer = outer, .timing = timing});
  sort();
  return units_.size() - 1;
}

UnitId Order::absorb(const Order& other, UnitId outer) {
  const auto first = units_.size();
  for (auto node : other.units_) {
    node.outer = node.outer ? *node.outer + first : outer;
    node.by_hand = node.by_hand == other.forwards_ ? forwards_ : -1;
    units_.push_back(std::move(node));
  }
  for (const auto unit : other.open_) open_.push_back(unit + first);
  sort();
  return first;
}

void Order::remove(UnitId unit) {
  units_[unit].alive = false;
  std::erase(open_, unit);
  std::erase(unfinished_, unit);
  last_.reset();
  std::erase(in_flight_, unit);
  sort();
}

void Order::sort() {
  made_.clear();
  for (UnitId unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].alive) made_.push_back(unit);
  }
  const auto number = [&](UnitId unit) { return units_[unit].number; };
  std::sort(made_.begin(), made_.end(), [&](UnitId a, UnitId b) { return number(a) < number(b); });
  find_companions();
  // The units below each unit, later-made ones first.
  std::vector<std::vector<UnitId>> inner(units_.size());
  std::vector<UnitId> outermost;
  for (auto unit = made_.rbegin(); unit != made_.rend(); ++unit) {
    const auto& outer = units_[*unit].outer;
    if (!outer) {
      outermost.push_back(*unit);
    } else if (*outer < inner.size()) {
      inner[*outer].push_back(*unit);
    }
  }
  sums_.clear();
  for (auto unit = outermost.rbegin(); unit != outermost.rend(); ++unit) append(*unit, inner);
}

void Order::find_companions() {
  for (UnitId unit = 0; unit < units_.size(); ++unit) {
    units_[unit].head = unit;
    units_[unit].companions.clear();
  }
  for (const auto unit : made_) {
    const auto& outer = units_[unit].outer;
    if (!units_[unit].timing.is_companion || !outer || *outer >= units_.size() || !units_[*outer].alive) continue;
    units_[unit].head = *outer;
    units_[*outer].companions.push_back(unit);
  }
}

// Gradients of companions come when those of their head do: after those of other units below it.
void Order::append(UnitId unit, const std::vector<std::vector<UnitId>>& inner) {
  for (const auto below : inner[unit]) {
    if (units_[below].head == below) append(below, inner);
  }
  for (const auto companion : units_[unit].companions) sums_.push_back(companion);
  sums_.push_back(unit);
}

bool Order::lies_below(UnitId unit, UnitId other) const {
  for (auto outer = units_[unit].outer; outer; outer = units_[*outer].outer) {
    if (*outer == other) return true;
  }
  return false;
}

bool Order::is_in(UnitId unit, Keep keep, Moment moment, Performer& rank) {
  if (last_ != Entered{units_[unit].head, keep, moment}) return false;
  // Sums start at events of a backward, and this is one.
  if (moment.backward != kNone) advance(moment, rank);
  return true;
}

bool Order::stays(UnitId other, UnitId entered, Keep keep, int backward) const {
  const auto head = units_[other].head;
  // Autograd numbers backwards as they begin.
  if (backward != kNone && units_[head].used_in >= backward_ && units_[head].used_in < backward) return true;
  if (keep >= Keep::all || head == entered || units_[head].in_forward || lies_below(entered, head)) return true;
  // A unit of several modules stays open while some of them have yet to run backward.
  if (backward != kNone && units_[head].timing.has_several_modules && units_[head].uses_to_come > 0) return true;
  return keep == Keep::outer_and_inner && lies_below(other, entered);
}

void Order::enter(UnitId entered, Keep keep, Moment moment, Performer& rank) {
  const auto unit = units_[entered].head;
  const bool backward = moment.backward != kNone;
  close_all([&](UnitId other) { return !stays(other, unit, keep, moment.backward); }, backward, rank);
  // Sums that start here make room for what is gathered.
  if (backward && sums_in_stream_) advance(moment, rank);
  const auto open = [&](UnitId one) {
    if (std::find(open_.begin(), open_.end(), one) == open_.end()) {
      open_.push_back(one);
      units_[one].used_in = kNone;
    }
    if (backward && units_[one].used_in < backward_) units_[one].used_in = moment.backward;
    if (backward) {
      units_[one].entered = true;
      return;
    }
    units_[one].in_forward = keep == Keep::all_to_end && !units_[one].timing.has_several_modules;
    units_[one].engaged = units_[one].engaged || moment.with_gradients;
  };
  open(unit);
  for (const auto companion : units_[unit].companions) open(companion);
  count_use(unit, moment);
  // All of a call's gathers are under way before the first is waited for.
  for (const auto companion : units_[unit].companions) rank.perform({Kind::gather_ahead, companion, backward});
  bool gathered = false;
  const auto gather = [&](UnitId one) {
    gathered = (rank.perform({Kind::gather, one}) && units_[one].timing.is_gathered) || gathered;
  };
  gather(unit);
  for (const auto companion : units_[unit].companions) gather(companion);
  const bool by_hand = is_by_hand(unit);
  const bool begins = by_hand && !units_[unit].outer;
  if (begins) units_[unit].by_hand = -1;
  prefetch(unit, by_hand ? begins : gathered, moment, rank);
  last_ = Entered{unit, keep, moment};
  if (backward) advance(moment, rank);
}

bool Order::is_gathered(UnitId head) const {
  const auto& companions = units_[head].companions;
  return units_[head].timing.is_gathered || std::any_of(companions.begin(), companions.end(), [&](UnitId unit) {
           return units_[unit].timing.is_gathered;
         });
}

// Forwards without gradients are not counted, nor is one inside a backward (a checkpoint's): its backward follows at
// once.
void Order::count_use(UnitId unit, Moment moment) {
  const bool backward = moment.backward != kNone;
  if (backward == moment.with_gradients || std::exchange(before_, unit) == unit) return;
  auto& node = units_[unit];
  if (backward) {
    node.used_in_backward = true;
    --node.uses_to_come;
    --node.uses_before_sum;
  } else {
    if (std::exchange(node.forward, forwards_) != forwards_) node.uses = 0;
    ++node.uses;
    ++node.uses_since;
  }
}

// A unit that runs again begins a new pass only without gradients. With gradients it may run twice in one forward, and
// end_forwards() says where that ends.
void Order::prefetch(UnitId unit, bool gathered, Moment moment, Performer& rank) {
  const bool backward = moment.backward != kNone;
  const auto& timing = units_[unit].timing;
  const bool has_list = backward ? timing.has_backward_list : timing.has_forward_list;
  if (has_list) rank.perform({Kind::gather_list, unit, backward});
  if (!gathered || !is_gathered(unit)) return;
  const bool infers = !backward && !moment.with_gradients;
  auto& order = backward ? backwards_ : infers ? inference_ : training_;
  if (infers && order.begins_new_pass(unit)) order.end_pass();
  const auto* next = order.used(unit);
  if (next == nullptr || !units_[*next].alive || is_by_hand(*next) || !prefetches || has_list) return;
  if (backward && !units_[*next].timing.unshard_in_backward) return;
  rank.perform({Kind::gather_ahead, *next, backward});
  for (const auto companion : units_[*next].companions) rank.perform({Kind::gather_ahead, companion, backward});
}

bool Order::in_forward() const {
  return std::any_of(open_.begin(), open_.end(), [&](UnitId unit) { return units_[unit].in_forward; });
}

void Order::end_forwards() {
  ++forwards_;
  before_.reset();
  training_.end_pass();
  inference_.end_pass();
}

// Unless `exactly`, an inner unit itself stays open: it may run again at once, on some ranks more often than on others.
void Order::leave(UnitId unit, bool exactly, Performer& rank) {
  const bool is_outermost = !units_[unit].outer;
  const auto goes = [&](UnitId other) {
    if (units_[other].head == unit) return exactly || is_outermost;
    return lies_below(other, unit);
  };
  close_all(goes, /*backward=*/false, rank);
  if (is_outermost) end_forwards();
}

// Freeing a unit may remove others from open_, so the search starts over each time.
template <typename Condition>
void Order::close_all(const Condition& goes, bool backward, Performer& rank) {
  for (auto found = open_.begin(); (found = std::find_if(open_.begin(), open_.end(), goes)) != open_.end();) {
    const auto unit = *found;
    last_.reset();
    open_.erase(found);
    units_[unit].in_forward = false;
    const bool frees = backward ? units_[unit].timing.reshard_after_backward : reshards_after_forward(unit);
    if (frees) rank.perform({Kind::free, unit, backward});
  }
}

void Order::free_all(Performer& rank) {
  last_.reset();
  std::erase_if(open_, [&](UnitId unit) { return !units_[unit].in_forward; });
  const auto made = made_;
  for (const auto unit : made) {
    const auto& node = units_[unit];
    if (node.timing.reshard_after_backward && !node.in_forward) rank.perform({Kind::free, unit, /*backward=*/true});
  }
}

void Order::reset(Performer& rank) {
  finish_sums(rank);
  forget_backward(rank);
  training_.forget_pass();
  inference_.forget_pass();
  open_.clear();
  const auto made = made_;
  for (const auto unit : made) {
    units_[unit].in_forward = false;
    units_[unit].engaged = false;
    units_[unit].uses_since = 0;
    units_[unit].by_hand = -1;
    rank.perform({Kind::free, unit, /*backward=*/true});
  }
}

void Order::reset_all(Performer& rank) {
  unfinished_.clear();
  reset(rank);
}

void Order::begin_backward(int backward, Performer& rank) {
  last_.reset();
  finish_sums(rank);
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
    // Several forwards may share one backward, or each may have its own, in any order.
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

void Order::gradient_arrived(UnitId unit, size_t parameter, Moment moment, Performer& rank) {
  reached_ = true;
  (is_inside_another(moment) ? units_[unit].reached_inside : units_[unit].engaged) = true;
  note(unit, parameter, moment);
  advance(moment, rank);
}

// Late sums wait for the end of the backward: those that share a process group with the sums of another tree, or with
// all-gathers, unless they start at points that all ranks share. Gradients become ready at different times on different
// ranks, so the order of collectives on that group would differ too. For the same reason nothing waits for a sum here:
// the ranks that it needs may be waiting for a gather that this rank reaches later.
void Order::advance(Moment moment, Performer& rank) {
  if (backward_ != moment.backward) return;
  start_sums([&] { return has_room(rank); }, rank);
}

bool Order::is_next(UnitId unit, Moment moment, Performer& rank) {
  return backward_ == moment.backward && !late_ && launched_ < sums_.size() && sums_[launched_] == unit &&
         has_room(rank);
}

// Second sums start in the order of first ones, so no sum is polled before those ahead of it are done.
bool Order::has_room(Performer& rank) {
  const auto is_done = [&](UnitId unit) { return rank.perform({Kind::poll_sum, unit}); };
  const auto busy = std::find_if_not(in_flight_.begin(), in_flight_.end(), is_done);
  return in_flight_.size() < most_in_flight_ || busy != in_flight_.begin();
}

template <typename Condition>
void Order::start_sums(const Condition& may_start, Performer& rank) {
  if (!in_backward() || !reached_ || late_) return;
  for (; launched_ < sums_.size(); ++launched_) {
    // may_start() is called first: it also starts the second part of the previous sum, which takes time too.
    if (!may_start() || units_[sums_[launched_]].missing > 0 || !is_over(sums_[launched_])) return;
    if (units_[sums_[launched_]].sums) launch(sums_[launched_], rank);
  }
}

size_t Order::ready() const {
  auto ready = launched_;
  if (!in_backward() || !reached_ || late_) return ready;
  while (ready < sums_.size() && units_[sums_[ready]].missing <= 0 && is_over(sums_[ready])) ++ready;
  return ready;
}

// With sums in a stream, ranks see the end of a unit at the same point only if each backward gathers it. Units inside
// it end with it.
bool Order::is_seen_in_backward(UnitId head) const {
  const auto& timing = units_[head].timing;
  return timing.sums_in_stream && timing.unshard_in_backward && is_gathered(head);
}

// This backward may or may not reach the unit: even if this rank expects none of its gradients, others may. A unit that
// was used in forward and is never reached delays all that follow to the end.
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

void Order::launch(UnitId unit, Performer& rank) {
  while (in_flight_.size() >= most_in_flight_) {
    rank.perform({Kind::wait_sum, in_flight_.front()});
    in_flight_.erase(in_flight_.begin());
  }
  in_flight_.push_back(unit);
  rank.perform({Kind::start_sum, unit});
}

void Order::end_backward(bool publishes, Performer& rank) {
  try {
    for (; launched_ < sums_.size(); ++launched_) {
      if (units_[sums_[launched_]].sums) launch(sums_[launched_], rank);
    }
    for (const auto unit : in_flight_) rank.perform({publishes ? Kind::wait_sum : Kind::finish_first_sum, unit});
    if (publishes) in_flight_.clear();
  } catch (...) {
    forget_backward(rank);
    throw;
  }
  backwards_.end_pass();
  unfinished_ = sums_;
  backward_ = kNone;
  free_all(rank);
  for (const auto unit : unfinished_) {
    units_[unit].entered = false;
    units_[unit].engaged = false;
    units_[unit].missing = 0;
  }
  if (publishes) finish_sums(rank);
}

void Order::begin_pending(Performer& rank) {
  finish_sums(rank);
  launched_ = 0;
  for (const auto unit : sums_) units_[unit].sums = takes_part(unit);
}

void Order::begin_pending(const std::vector<UnitId>& units, Performer& rank) {
  finish_sums(rank);
  launched_ = 0;
  for (const auto unit : sums_) units_[unit].sums = false;
  for (const auto unit : units) {
    units_[unit].reached_inside = false;
    engage(unit);
  }
}

void Order::finish_sums(Performer& rank) {
  const auto units = std::exchange(unfinished_, {});
  if (units.empty()) return;
  for (const auto unit : std::exchange(in_flight_, {})) rank.perform({Kind::wait_sum, unit});
  for (const auto unit : units) {
    if (!units_[unit].alive) continue;
    rank.perform({Kind::publish, unit});
    if (!units_[unit].reached_inside) rank.perform({Kind::run_hooks, unit});
  }
}

// Otherwise a sum starts once the previous one is done, which is at different times on different ranks. If a backward
// dies on all ranks, every sum that all ranks can start is started, whatever is still under way.
void Order::start_ready_sums(Performer& rank) {
  start_sums([] { return true; }, rank);
}

void Order::forget_backward(Performer& rank) {
  backwards_.forget_pass();
  in_flight_.clear();
  backward_ = kNone;
  const auto made = made_;
  for (const auto unit : made) {
    units_[unit].entered = false;
    units_[unit].missing = 0;
    rank.perform({Kind::forget_backward, unit});
  }
  free_all(rank);
}

} // namespace shardwise::engine
