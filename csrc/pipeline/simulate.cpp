#include "pipeline/simulate.h"

#include "pipeline/check.h"
#include "pipeline/flow.h"

#include <algorithm>

namespace shardwise::pipeline {
namespace {

double duration(Kind kind, const Costs& costs) {
  switch (kind) {
    case Kind::forward:
      return costs.forward;
    case Kind::backward:
      return costs.backward_input + costs.backward_weight;
    case Kind::backward_input:
      return costs.backward_input;
    case Kind::backward_weight:
      return costs.backward_weight;
    default:
      return 0;
  }
}

} // namespace

Times simulate(const Table& table, const Costs& costs) {
  check_schedule(table);
  Times times;
  for (const auto& actions : table.of_rank) times.of_rank.emplace_back(actions.size());
  times.busy.resize(table.of_rank.size(), 0);
  std::vector<double> free(table.of_rank.size(), 0);
  PerAction<double> ends(table, 0);
  const bool is_lowered = has_transfers(table);
  for (const auto& [rank, index] : order_of(table)) {
    const auto& action = table.of_rank[rank][index];
    // When the data is there. It is on its way as soon as both ranks are ready for it.
    auto ready = free[rank];
    for (const auto& need : needs(table, action, is_lowered)) {
      const bool is_here = table.rank_of_stage[need.stage] == rank;
      const auto left = is_receive(action.kind) ? std::max(free[rank], ends[need]) : ends[need];
      ready = std::max(ready, left + (is_here ? 0 : costs.transfer));
    }
    const bool is_transfer = is_send(action.kind) || is_receive(action.kind);
    const Span span{is_transfer ? free[rank] : ready, ready + duration(action.kind, costs)};
    times.of_rank[rank][index] = span;
    ends.set(action, span.end);
    if (is_transfer) continue;
    free[rank] = span.end;
    times.busy[rank] += duration(action.kind, costs);
    times.makespan = std::max(times.makespan, span.end);
  }
  for (const auto busy : times.busy) times.bubble.push_back(times.makespan > 0 ? 1 - busy / times.makespan : 0);
  return times;
}

} // namespace shardwise::pipeline
