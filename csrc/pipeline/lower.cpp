#include "pipeline/lower.h"

#include "pipeline/flow.h"
#include "pipeline/simulate.h"

#include <shardwise/error.h>

#include <algorithm>
#include <tuple>

namespace shardwise::pipeline {
namespace {

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
  if (has_transfers(table)) {
    throw ValueError(
        "shardwise: with_transfers() got a pipeline table that has sends and receives already. It adds all that are "
        "needed; give it a table that only computes.");
  }
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
