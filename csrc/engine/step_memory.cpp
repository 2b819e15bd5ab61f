#include "engine/step_memory.h"

#include "comm/idle_choice.h"
#include "engine/pass_order.h"

#include <algorithm>
#include <utility>

namespace shardwise::engine {
namespace {

/// comm::Buffers, in sizes.
class Pool {
 public:
  /// The size of what is given.
  int64_t take(int64_t bytes) {
    const auto rank = [&](size_t i) { return std::optional(std::pair(idle_[i], i)); };
    const auto choice = comm::choose_idle(idle_.size(), bytes, rank);
    if (choice.serves) return remove(*choice.serves);
    if (choice.gives_way) all_ -= remove(*choice.gives_way);
    all_ += bytes;
    return bytes;
  }
  void give(int64_t size) {
    idle_.push_back(size);
  }
  int64_t all() const {
    return all_;
  }

 private:
  int64_t remove(size_t i) {
    const auto size = idle_[i];
    idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(i));
    return size;
  }

  std::vector<int64_t> idle_;
  int64_t all_ = 0;
};

class Walk {
 public:
  Walk(const std::vector<UnitBytes>& units, const std::vector<StepEvent>& events)
      : units_(units),
        events_(events),
        states_(units.size()) {
    for (const auto& event : events_) {
      if (event.kind == StepEvent::Kind::use && event.gradient > 0) ++states_[event.unit].trained;
    }
    append(units_.size() - 1);
  }

  StepPeaks step() {
    peaks_ = {};
    backward_ = false;
    note();
    for (const auto& event : events_) {
      event.kind == StepEvent::Kind::end ? leave(event.unit) : enter(event.unit, false);
    }
    training_.end_pass();
    backward_ = true;
    note();
    for (auto& state : states_) state.missing = state.trained;
    for (auto event = events_.rbegin(); event != events_.rend(); ++event) go_back(*event);
    while (launched_ < order_.size()) launch(order_[launched_++]);
    settle();
    for (size_t unit = 0; unit < units_.size(); ++unit) free(unit, false);
    backwards_.end_pass();
    open_.clear();
    launched_ = 0;
    local_ = 0;
    peaks_.pool = pool_.all();
    return peaks_;
  }

 private:
  struct Taken {
    int64_t full = 0;
    int64_t gathered = 0;
    int64_t sent = 0;
    int64_t held = 0;
  };
  enum class Full { freed, gathering, there };
  struct State {
    int64_t trained = 0;
    int64_t missing = 0;
    int64_t gradients = 0;
    Full full = Full::freed;
    std::vector<Taken> taken;
  };

  void append(size_t unit) {
    for (size_t i = units_.size(); i-- > 0;) {
      if (units_[i].outer == unit) append(i);
    }
    order_.push_back(unit);
  }

  void note() {
    auto& peak = backward_ ? peaks_.backward : peaks_.forward;
    peak = std::max(peak, pool_.all() + local_);
    peaks_.local_gradients = std::max(peaks_.local_gradients, local_);
  }
  int64_t take(int64_t bytes) {
    if (bytes == 0) return 0;
    const auto size = pool_.take(bytes);
    note();
    return size;
  }
  void give(int64_t& size) {
    if (size > 0) pool_.give(size);
    size = 0;
  }

  bool lies_below(size_t unit, size_t other) const {
    for (auto outer = units_[unit].outer; outer; outer = units_[*outer].outer) {
      if (*outer == other) return true;
    }
    return false;
  }

  void enter(size_t unit, bool inner_stay) {
    const auto open = open_;
    for (const auto other : open) {
      const bool stays = other == unit || lies_below(unit, other) || (inner_stay && lies_below(other, unit));
      if (!stays) close(other);
    }
    if (std::find(open_.begin(), open_.end(), unit) == open_.end()) open_.push_back(unit);
    if (!units_[unit].has_full_copies) return;
    const bool gathers = states_[unit].full != Full::there;
    begin(unit);
    finish(unit);
    if (!gathers || !units_[unit].is_gathered) return;
    if (const auto* next = (backward_ ? backwards_ : training_).used(unit)) begin(*next);
  }

  void leave(size_t unit) {
    const auto open = open_;
    for (const auto other : open) {
      if (lies_below(other, unit) || (other == unit && !units_[unit].outer)) close(other);
    }
  }

  void close(size_t unit) {
    std::erase(open_, unit);
    if (backward_ || units_[unit].reshards_after_forward) free(unit, !backward_);
  }

  void begin(size_t unit) {
    auto& state = states_[unit];
    if (state.full != Full::freed) return;
    state.full = Full::gathering;
    state.taken.resize(units_[unit].groups.size());
    for (size_t i = 0; i < state.taken.size(); ++i) {
      const auto& group = units_[unit].groups[i];
      auto& taken = state.taken[i];
      const bool from_held = taken.held > 0;
      taken.full = take(group.full);
      taken.gathered = take(group.gathered);
      if (!from_held) taken.sent = take(group.sent);
    }
  }

  void finish(size_t unit) {
    auto& state = states_[unit];
    if (state.full != Full::gathering) return;
    state.full = Full::there;
    for (size_t i = 0; i < state.taken.size(); ++i) {
      auto& taken = state.taken[i];
      if (taken.held == 0 && !backward_) taken.held = take(units_[unit].groups[i].held);
      give(taken.gathered);
      give(taken.sent);
    }
  }

  void free(size_t unit, bool hold) {
    auto& state = states_[unit];
    for (auto& taken : state.taken) {
      give(taken.gathered);
      give(taken.sent);
      give(taken.full);
      if (!hold) give(taken.held);
    }
    state.full = Full::freed;
  }

  void go_back(const StepEvent& event) {
    if (event.kind == StepEvent::Kind::begin) return;
    enter(event.unit, event.kind == StepEvent::Kind::end);
    if (event.gradient > 0) {
      local_ += event.gradient;
      states_[event.unit].gradients += event.gradient;
      --states_[event.unit].missing;
      note();
    }
    for (; launched_ < order_.size() && states_[order_[launched_]].missing == 0; ++launched_) launch(order_[launched_]);
  }

  void launch(size_t unit) {
    settle();
    for (const auto& group : units_[unit].groups) buckets_.push_back(take(group.bucket));
    const auto whole = std::exchange(states_[unit].gradients, 0);
    if (units_[unit].is_summed) local_ -= whole;
  }
  void settle() {
    for (auto& bucket : buckets_) give(bucket);
    buckets_.clear();
  }

  const std::vector<UnitBytes>& units_;
  const std::vector<StepEvent>& events_;
  std::vector<State> states_;
  std::vector<size_t> order_;
  std::vector<size_t> open_;
  PassOrder<size_t> training_;
  PassOrder<size_t> backwards_;
  Pool pool_;
  std::vector<int64_t> buckets_;
  size_t launched_ = 0;
  int64_t local_ = 0;
  bool backward_ = false;
  StepPeaks peaks_;
};

} // namespace

StepPeaks walk_steps(const std::vector<UnitBytes>& units, const std::vector<StepEvent>& forward) {
  if (units.empty()) return {};
  Walk walk(units, forward);
  auto peaks = walk.step();
  // The first step gathers nothing ahead; each may make the pool larger once more.
  for (int steps = 0; steps < 16; ++steps) {
    const auto next = walk.step();
    const bool same = next.pool == peaks.pool && next.forward == peaks.forward && next.backward == peaks.backward;
    peaks = next;
    if (same) break;
  }
  return peaks;
}

} // namespace shardwise::engine
