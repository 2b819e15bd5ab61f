#include "pipeline/simulate.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

namespace shardwise::pipeline {
namespace {

/// When what other stages compute of each microbatch is there.
class Arrivals {
 public:
  explicit Arrivals(const Table& table)
      : table_(table),
        outputs_(static_cast<size_t>(table.stages()) * table.microbatches, kNotYet),
        gradients_(outputs_) {}

  static constexpr double kNotYet = std::numeric_limits<double>::infinity();

  /// What this action needs from another stage. Its own stage's part comes before it in its rank's list.
  double needed_by(const Action& action) const {
    const auto [kind, stage, microbatch] = action;
    if (kind == Kind::forward) return stage == 0 ? 0 : outputs_[place(stage - 1, microbatch)];
    if (kind == Kind::backward_weight || stage + 1 == table_.stages()) return 0;
    return gradients_[place(stage + 1, microbatch)];
  }
  /// What this action computed. Other stages wait for no half on the weights.
  void add(const Action& action, double end) {
    const auto [kind, stage, microbatch] = action;
    if (kind == Kind::backward_weight) return;
    (kind == Kind::forward ? outputs_ : gradients_)[place(stage, microbatch)] = end;
  }

 private:
  size_t place(int stage, int microbatch) const {
    return static_cast<size_t>(stage) * table_.microbatches + microbatch;
  }

  const Table& table_;
  std::vector<double> outputs_;
  std::vector<double> gradients_;
};

} // namespace

Times simulate(const Table& table) {
  Times times;
  times.of_rank.resize(table.of_rank.size());
  times.busy.resize(table.of_rank.size(), 0);
  Arrivals arrivals(table);
  const auto go_on = [&](int rank) {
    auto& spans = times.of_rank[rank];
    if (spans.size() == table.of_rank[rank].size()) return false;
    const auto& action = table.of_rank[rank][spans.size()];
    const auto needed = arrivals.needed_by(action);
    if (needed == Arrivals::kNotYet) return false;
    const auto begin = std::max(needed, spans.empty() ? 0 : spans.back().end);
    const double duration = action.kind == Kind::backward ? 2 : 1;
    spans.push_back({begin, begin + duration});
    arrivals.add(action, begin + duration);
    times.busy[rank] += duration;
    times.makespan = std::max(times.makespan, begin + duration);
    return true;
  };
  for (bool is_moving = true; is_moving;) {
    is_moving = false;
    for (int rank = 0; rank < table.ranks(); ++rank) {
      while (go_on(rank)) is_moving = true;
    }
  }
  for (int rank = 0; rank < table.ranks(); ++rank) {
    TORCH_INTERNAL_ASSERT(
        times.of_rank[rank].size() == table.of_rank[rank].size(), "ranks wait for ever:\n", text(table));
    times.bubble.push_back(times.makespan > 0 ? 1 - times.busy[rank] / times.makespan : 0);
  }
  return times;
}

namespace {

/// The send that takes what an action computes to the rank that needs it. None if no other rank does.
std::optional<Action> send_after(const Table& table, const Action& action) {
  const bool is_forward = action.kind == Kind::forward;
  if (!is_forward && action.kind != Kind::backward && action.kind != Kind::backward_input) return std::nullopt;
  const Action send{is_forward ? Kind::send_forward : Kind::send_backward, action.stage, action.microbatch};
  const auto to = other_end(send);
  const bool is_elsewhere =
      to >= 0 && to < table.stages() && table.rank_of_stage[to] != table.rank_of_stage[action.stage];
  return is_elsewhere ? std::optional(send) : std::nullopt;
}

Action receive_of(const Action& send) {
  const auto kind = send.kind == Kind::send_forward ? Kind::receive_forward : Kind::receive_backward;
  return {kind, other_end(send), send.microbatch};
}

/// An action begins, or a transfer of its result does.
struct Event {
  double time;
  bool computes;
  int rank;
  size_t index;

  /// At the same time, transfers come first: what begins then may use the data.
  bool operator<(const Event& other) const {
    return std::tie(time, computes, rank, index) < std::tie(other.time, other.computes, other.rank, other.index);
  }
};

/// In the order in which they happen. A transfer is one event for both of its ranks, so no two of them can wait for
/// each other.
std::vector<Event> events_of(const Table& table) {
  const auto times = simulate(table);
  std::vector<Event> events;
  for (int rank = 0; rank < table.ranks(); ++rank) {
    for (size_t i = 0; i < table.of_rank[rank].size(); ++i) {
      const auto [begin, end] = times.of_rank[rank][i];
      events.push_back({begin, true, rank, i});
      if (send_after(table, table.of_rank[rank][i])) events.push_back({end, false, rank, i});
    }
  }
  std::sort(events.begin(), events.end());
  return events;
}

} // namespace

Table with_transfers(const Table& table) {
  Table lowered{table.microbatches, table.rank_of_stage, {}};
  lowered.of_rank.resize(table.of_rank.size());
  for (const auto& event : events_of(table)) {
    const auto& action = table.of_rank[event.rank][event.index];
    if (event.computes) {
      lowered.of_rank[event.rank].push_back(action);
      continue;
    }
    const auto send = *send_after(table, action);
    const auto receive = receive_of(send);
    lowered.of_rank[event.rank].push_back(send);
    lowered.of_rank[table.rank_of_stage[receive.stage]].push_back(receive);
  }
  return lowered;
}

} // namespace shardwise::pipeline
