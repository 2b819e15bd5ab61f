#include "engine/step_time.h"

#include <algorithm>
#include <cmath>

namespace shardwise::engine {
namespace {

/// Every `stride`-th rank, `size` of them.
struct Axis {
  int64_t size;
  int64_t stride;
};

/// How long collectives take.
class Wire {
 public:
  explicit Wire(const Links& links) : links_(links) {}

  /// Each rank gets from each other one, or sends to it, this many bytes.
  double exchange(const Axis& axis, int64_t bytes) const {
    if (axis.size == 1 || bytes == 0) return 0;
    const auto host = links_.ranks_per_host();
    const auto here = host > 0 ? std::clamp<int64_t>(host / axis.stride, 1, axis.size) : axis.size;
    const auto between = static_cast<double>((axis.size - here) * bytes);
    auto latency = 0.0;
    auto busy = 0.0;
    const auto add = [&](const Link& link, double all) {
      if (all == 0) return;
      latency += link.latency;
      busy = std::max(busy, all / link.bytes_per_second);
    };
    // What comes from other hosts is passed on within the host, where it has to reach every rank.
    if (here > 1) add(links_.inside(), static_cast<double>((axis.size - 1) * bytes));
    // The groups of a host share its link.
    add(links_.between(), between * static_cast<double>(std::max<int64_t>(host / here, 1)));
    return latency + busy;
  }
  double all_reduce(const Axis& axis, int64_t bytes) const {
    return 2 * exchange(axis, (bytes + axis.size - 1) / axis.size);
  }

 private:
  const Links& links_;
};

class Clock final : private StepWalk {
 public:
  Clock(
      const std::vector<UnitBytes>& units, const std::vector<StepEvent>& events, const StepRanks& ranks, double compute,
      size_t sums_in_flight)
      : StepWalk(units, events, sums_in_flight),
        states_(units.size()) {
    const Wire wire(ranks.links);
    const Axis shards{ranks.shards, 1};
    const Axis copies{ranks.copies, ranks.shards};
    const Axis all{ranks.shards * ranks.copies, 1};
    for (size_t i = 0; i < units.size(); ++i) {
      for (const auto& group : units[i].groups) {
        if (units[i].is_gathered) {
          const auto gather = wire.exchange(shards, group.part);
          states_[i].gather += gather;
          const auto parts = group.held > 0 ? group.held / group.part : 1;
          states_[i].gather_held += parts > 1 ? wire.exchange({ranks.shards / parts, 1}, group.held) : gather;
        }
        if (!units[i].is_summed) continue;
        if (group.bucket > 0) {
          states_[i].sum += wire.exchange(shards, group.sum) + wire.all_reduce(copies, group.sum);
        } else {
          states_[i].sum += wire.all_reduce(all, group.sum);
        }
      }
    }
    auto work = 0.0;
    for (const auto& event : events) work += event.work;
    (work > 0 ? seconds_ : elsewhere_) = work > 0 ? compute / 3 / work : compute;
  }

  StepTime step() {
    now_ = 0;
    wire_free_ = 0;
    result_.wire = 0;
    forward();
    backward();
    result_.step = now_ + elsewhere_;
    return result_;
  }

 private:
  struct State {
    /// The seconds of its collectives.
    double gather = 0;
    double gather_held = 0;
    double sum = 0;
    enum class Full { freed, gathering, there } full = Full::freed;
    bool holds = false;
    double full_at = 0;
    double summed_at = 0;
  };

  void use(const StepEvent& event) override {
    now_ += (in_backward() ? 2 : 1) * seconds_ * event.work;
  }

  bool perform(Action action) override {
    using Kind = Action::Kind;
    auto& state = states_[action.unit];
    switch (action.kind) {
      case Kind::gather:
        if (!units()[action.unit].has_full_copies || state.full == State::Full::there) return false;
        begin(state);
        wait(state.full_at);
        state.full = State::Full::there;
        return true;
      case Kind::gather_ahead:
        begin(state);
        break;
      case Kind::free:
        state.full = State::Full::freed;
        state.holds = !action.backward;
        break;
      case Kind::start_sum:
        state.summed_at = send(state.sum);
        break;
      case Kind::poll_sum:
        return units()[action.unit].sums_in_stream || now_ >= state.summed_at;
      case Kind::wait_sum:
      case Kind::publish:
        wait(state.summed_at);
        break;
      default:
        break;
    }
    return false;
  }

  void begin(State& state) {
    if (state.full != State::Full::freed) return;
    state.full = State::Full::gathering;
    state.full_at = send(in_backward() && state.holds ? state.gather_held : state.gather);
  }
  /// Returns when it will have arrived.
  double send(double seconds) {
    if (seconds == 0) return now_;
    wire_free_ = std::max(wire_free_, now_) + seconds;
    result_.wire += seconds;
    return wire_free_;
  }
  void wait(double until) {
    now_ = std::max(now_, until);
  }

  std::vector<State> states_;
  /// Of a forward, for a unit of work.
  double seconds_ = 0;
  /// What is computed if nothing is with a parameter.
  double elsewhere_ = 0;
  double now_ = 0;
  double wire_free_ = 0;
  StepTime result_;
};

} // namespace

StepTime time_steps(
    const std::vector<UnitBytes>& units, const std::vector<StepEvent>& forward, const StepRanks& ranks, double compute,
    size_t sums_in_flight) {
  if (units.empty()) return {.step = compute};
  Clock clock(units, forward, ranks, compute, sums_in_flight);
  // The first step gathers nothing ahead.
  auto result = clock.step();
  for (int steps = 0; steps < 16; ++steps) {
    const auto next = clock.step();
    const bool same = std::abs(next.step - result.step) <= 1e-9 * result.step;
    result = next;
    if (same) break;
  }
  return result;
}

} // namespace shardwise::engine
