#include "engine/order.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace shardwise::engine {

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
  std::erase(unsettled_, unit);
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

bool Order::is_in(UnitId unit, Keep keep, Moment moment, OrderActions& act) {
  if (last_ != Entered{units_[unit].head, keep, moment}) return false;
  // Sums start at events of a backward, and this is one.
  if (moment.backward != kNone) advance(moment, act);
  return true;
}

bool Order::stays(UnitId other, UnitId entered, Keep keep, bool backward) const {
  const auto head = units_[other].head;
  if (keep >= Keep::all || head == entered || units_[head].in_forward || lies_below(entered, head)) return true;
  // A unit of several modules stays open while some of them are still to run backward.
  if (backward && units_[head].timing.has_several_modules && units_[head].uses_to_come > 0) return true;
  return keep == Keep::outer_and_inner && lies_below(other, entered);
}

void Order::enter(UnitId entered, Keep keep, Moment moment, OrderActions& act) {
  const auto unit = units_[entered].head;
  const bool backward = moment.backward != kNone;
  close_all([&](UnitId other) { return !stays(other, unit, keep, backward); }, backward, act);
  // Its gradients make room for what is gathered.
  if (backward && sums_in_stream_) advance(moment, act);
  const auto open = [&](UnitId one) {
    if (std::find(open_.begin(), open_.end(), one) == open_.end()) open_.push_back(one);
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
  const bool gathered = gather_call(unit, backward, act);
  const bool by_hand = is_by_hand(unit);
  const bool begins = by_hand && !units_[unit].outer;
  if (begins) units_[unit].by_hand = -1;
  prefetch(unit, by_hand ? begins : gathered, moment, act);
  last_ = Entered{unit, keep, moment};
  if (backward) advance(moment, act);
}

// All of a call's gathers are under way before the first is waited for.
bool Order::gather_call(UnitId head, bool backward, OrderActions& act) {
  const auto& companions = units_[head].companions;
  for (const auto companion : companions) act.gather_ahead(companion, backward);
  bool gathered = act.gather(head) && units_[head].timing.is_gathered;
  for (const auto companion : companions) {
    gathered = (act.gather(companion) && units_[companion].timing.is_gathered) || gathered;
  }
  return gathered;
}

bool Order::is_gathered(UnitId head) const {
  const auto& companions = units_[head].companions;
  return units_[head].timing.is_gathered || std::any_of(companions.begin(), companions.end(), [&](UnitId unit) {
           return units_[unit].timing.is_gathered;
         });
}

// Not counted are forwards without gradients, and one inside a backward (a checkpoint's): its own backward follows at
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

// Only without gradients does a unit that comes round again begin a new pass. With gradients it may run twice in one
// forward, and end_forwards() says where that ends.
void Order::prefetch(UnitId unit, bool gathered, Moment moment, OrderActions& act) {
  const bool backward = moment.backward != kNone;
  const auto& timing = units_[unit].timing;
  const bool has_list = backward ? timing.has_backward_list : timing.has_forward_list;
  if (has_list) act.gather_list(unit, backward);
  if (!gathered || !is_gathered(unit)) return;
  const bool infers = !backward && !moment.with_gradients;
  auto& order = backward ? backwards_ : infers ? inference_ : training_;
  if (infers && order.comes_round(unit)) order.end_pass();
  const auto* next = order.used(unit);
  if (next == nullptr || !units_[*next].alive || is_by_hand(*next) || !prefetches || has_list) return;
  if (backward && !units_[*next].timing.unshard_in_backward) return;
  act.gather_ahead(*next, backward);
  for (const auto companion : units_[*next].companions) act.gather_ahead(companion, backward);
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
void Order::leave(UnitId unit, bool exactly, OrderActions& act) {
  const bool is_outermost = !units_[unit].outer;
  const auto goes = [&](UnitId other) {
    if (units_[other].head == unit) return exactly || is_outermost;
    return lies_below(other, unit);
  };
  close_all(goes, /*backward=*/false, act);
  if (is_outermost) end_forwards();
}

// Freeing a unit may remove others from open_, so the search starts over each time.
template <typename Condition>
void Order::close_all(const Condition& goes, bool backward, OrderActions& act) {
  for (auto found = open_.begin(); (found = std::find_if(open_.begin(), open_.end(), goes)) != open_.end();) {
    const auto unit = *found;
    last_.reset();
    open_.erase(found);
    units_[unit].in_forward = false;
    const bool frees = backward ? units_[unit].timing.reshard_after_backward : reshards_after_forward(unit);
    if (frees) act.free(unit, /*hold=*/!backward);
  }
}

void Order::free_all(OrderActions& act) {
  last_.reset();
  std::erase_if(open_, [&](UnitId unit) { return !units_[unit].in_forward; });
  const auto made = made_;
  for (const auto unit : made) {
    const auto& node = units_[unit];
    if (node.timing.reshard_after_backward && !node.in_forward) act.free(unit, /*hold=*/false);
  }
}

void Order::reset(OrderActions& act) {
  settle(act);
  forget_backward(act);
  training_.forget_pass();
  inference_.forget_pass();
  open_.clear();
  const auto made = made_;
  for (const auto unit : made) {
    units_[unit].in_forward = false;
    units_[unit].engaged = false;
    units_[unit].uses_since = 0;
    units_[unit].by_hand = -1;
    act.free(unit, /*hold=*/false);
  }
}

void Order::reset_all(OrderActions& act) {
  unsettled_.clear();
  reset(act);
}

std::string Order::describe() const {
  std::ostringstream text;
  const auto list = [&](const char* what, const std::vector<UnitId>& units) {
    text << what;
    for (const auto unit : units) text << ' ' << unit;
  };
  list("open:", open_);
  list("; sums:", sums_);
  text << "; started: " << launched_ << "; backward: " << backward_;
  for (const auto unit : made_) {
    if (units_[unit].missing > 0) text << "; " << unit << " misses " << units_[unit].missing;
  }
  return text.str();
}

} // namespace shardwise::engine
