#include "engine/step_memory.h"

#include "comm/collectives/idle_choice.h"

#include <algorithm>
#include <utility>

namespace shardwise::engine {
namespace {

/// Simulates comm::Buffers with sizes alone.
class Pool {
 public:
  explicit Pool(bool keeps_idle) : keeps_idle_(keeps_idle) {}

  /// Returns the size of the memory that is given out.
  int64_t take(int64_t bytes) {
    const auto rank = [&](size_t i) { return std::optional(std::pair(idle_[i], i)); };
    const auto choice = comm::choose_idle(idle_.size(), bytes, rank);
    if (choice.serves) return remove(*choice.serves);
    if (choice.gives_way) all_ -= remove(*choice.gives_way);
    all_ += bytes;
    return bytes;
  }
  void give(int64_t size) {
    if (keeps_idle_) {
      idle_.push_back(size);
    } else {
      all_ -= size;
    }
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

  bool keeps_idle_;
  std::vector<int64_t> idle_;
  int64_t all_ = 0;
};

/// Counts what a step takes.
class Walk final : private StepWalk {
 public:
  Walk(
      const std::vector<UnitBytes>& units, const std::vector<StepEvent>& events, size_t sums_in_flight, bool keeps_idle)
      : StepWalk(units, events, sums_in_flight),
        sums_in_flight_(sums_in_flight),
        states_(units.size()),
        pool_(keeps_idle) {}

  StepPeaks step() {
    peaks_ = {};
    note();
    forward();
    peaks_.backward = now();
    backward();
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
    int64_t gradients = 0;
    Full full = Full::freed;
    std::vector<Taken> taken;
    /// By group; 0 where there is none now.
    std::vector<int64_t> buckets;
    std::vector<int64_t> sums;
    /// By group: large gradients that wait for their bucket.
    std::vector<int64_t> large;
  };

  void use(const StepEvent& event) override {
    if (!in_backward() || event.gradient == 0) return;
    local_ += event.gradient;
    arrive(event);
    take_large(event.unit, is_next(event.unit));
  }

  void arrive(const StepEvent& event) {
    auto& state = states_[event.unit];
    state.gradients += event.gradient;
    state.large.resize(units()[event.unit].groups.size());
    if (event.moves_at_once && units()[event.unit].is_summed) state.large[event.group] += event.gradient;
    note();
  }

  void take_large(UnitId unit, bool is_next) {
    auto& state = states_[unit];
    for (size_t i = 0; i < state.large.size(); ++i) {
      if (units()[unit].groups[i].bucket > 0 && !is_next) continue;
      const auto large = std::exchange(state.large[i], 0);
      if (large == 0) continue;
      open_bucket(unit, i);
      state.gradients -= large;
      local_ -= large;
    }
  }

  int64_t now() const {
    return pool_.all() + local_ + sums_;
  }
  void note() {
    auto& peak = in_backward() ? peaks_.backward : peaks_.forward;
    peak = std::max(peak, now());
    peaks_.unsummed_gradients = std::max(peaks_.unsummed_gradients, local_);
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

  bool perform(Action action) override {
    using Kind = Action::Kind;
    auto& state = states_[action.unit];
    switch (action.kind) {
      case Kind::gather:
        rest(action.unit);
        if (!units()[action.unit].has_full_copies || state.full == Full::there) return false;
        begin(action.unit);
        finish(action.unit);
        return true;
      case Kind::gather_ahead:
        rest(action.unit);
        begin(action.unit);
        break;
      case Kind::free:
        free(action.unit, /*hold=*/!action.backward);
        break;
      case Kind::start_sum:
        start_sum(action.unit);
        break;
      case Kind::wait_sum:
        std::erase(under_way_, action.unit);
        give_buckets(action.unit);
        break;
      case Kind::poll_sum:
        return poll(action.unit);
      default:
        break;
    }
    return false;
  }

  void begin(UnitId unit) {
    auto& state = states_[unit];
    if (state.full != Full::freed) return;
    state.full = Full::gathering;
    state.taken.resize(units()[unit].groups.size());
    for (size_t i = 0; i < state.taken.size(); ++i) {
      const auto& group = units()[unit].groups[i];
      auto& taken = state.taken[i];
      const bool from_held = taken.held > 0;
      if (group.gathers_into_full && taken.full == 0) taken.full = take(group.full);
      taken.gathered = take(group.gathered);
      if (!from_held) taken.sent = take(group.sent);
    }
  }

  void finish(UnitId unit) {
    auto& state = states_[unit];
    state.full = Full::there;
    for (size_t i = 0; i < state.taken.size(); ++i) {
      auto& taken = state.taken[i];
      if (taken.full == 0) taken.full = take(units()[unit].groups[i].full);
      if (taken.held == 0 && !in_backward()) taken.held = take(units()[unit].groups[i].held);
      give(taken.gathered);
      give(taken.sent);
    }
  }

  void free(UnitId unit, bool hold) {
    auto& state = states_[unit];
    for (auto& taken : state.taken) {
      give(taken.gathered);
      give(taken.sent);
      if (!units()[unit].keeps_full) give(taken.full);
      if (!hold) give(taken.held);
    }
    state.full = Full::freed;
  }

  void start_sum(UnitId unit) {
    under_way_.push_back(unit);
    for (size_t i = 0; i < units()[unit].groups.size(); ++i) open_bucket(unit, i);
    states_[unit].large.clear();
    const auto whole = std::exchange(states_[unit].gradients, 0);
    if (units()[unit].is_summed) local_ -= whole;
    for (size_t i = 0; i < units()[unit].groups.size(); ++i) provide_result(unit, i);
  }

  // As many sums as allowed are under way; the oldest is assumed done at the next event. In a stream a sum counts as
  // done at once, without a wait.
  bool poll(UnitId unit) {
    const bool is_under_way = std::find(under_way_.begin(), under_way_.end(), unit) != under_way_.end();
    if (units()[unit].sums_in_stream || !is_under_way) return true;
    if (under_way_.size() < sums_in_flight_) return false;
    std::erase(under_way_, unit);
    give_buckets(unit);
    return true;
  }

  // In backward, the sums of the last backward rest already.
  void rest(UnitId unit) {
    if (in_backward()) return;
    for (auto& sum : states_[unit].sums) sums_ -= std::exchange(sum, 0);
  }

  void open_bucket(UnitId unit, size_t group) {
    const bool is_result = units()[unit].groups[group].bucket == 0;
    if (is_result) provide_result(unit, group);
    auto& buckets = states_[unit].buckets;
    buckets.resize(units()[unit].groups.size());
    if (buckets[group] == 0) buckets[group] = take(units()[unit].groups[group].bucket);
  }

  void provide_result(UnitId unit, size_t group) {
    auto& sums = states_[unit].sums;
    sums.resize(units()[unit].groups.size());
    if (sums[group] > 0) return;
    sums[group] = units()[unit].groups[group].sum;
    sums_ += sums[group];
    note();
  }

  void give_buckets(UnitId unit) {
    for (auto& bucket : states_[unit].buckets) give(bucket);
  }

  size_t sums_in_flight_;
  std::vector<UnitId> under_way_;
  std::vector<State> states_;
  Pool pool_;
  int64_t local_ = 0;
  int64_t sums_ = 0;
  StepPeaks peaks_;
};

} // namespace

StepPeaks walk_steps(
    const std::vector<UnitBytes>& units, const std::vector<StepEvent>& forward, size_t sums_in_flight,
    bool keeps_idle) {
  if (units.empty()) return {};
  Walk walk(units, forward, sums_in_flight, keeps_idle);
  auto peaks = walk.step();
  // The first step gathers nothing ahead, and each step may still enlarge the pool.
  for (int steps = 0; steps < 16; ++steps) {
    const auto next = walk.step();
    const bool same = next.pool == peaks.pool && next.forward == peaks.forward && next.backward == peaks.backward;
    peaks = next;
    if (same) break;
  }
  return peaks;
}

} // namespace shardwise::engine
