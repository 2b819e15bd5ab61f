#pragma once

#include "pipeline/table.h"

#include <vector>

namespace shardwise::pipeline {

struct Span {
  double begin = 0;
  double end = 0;
};

/// When things happen.
struct Times {
  /// Of each action, as in Table::of_rank.
  std::vector<std::vector<Span>> of_rank;
  /// When the last rank is done; all begin at 0.
  double makespan = 0;
  /// How long each rank computes.
  std::vector<double> busy;
  /// The share of the makespan in which each rank computes nothing.
  std::vector<double> bubble;
};

/// The times when every rank works through its list as early as it can, for a table without transfers: a forward and
/// each half of a backward take 1, and data is at once where it is needed.
SHARDWISE_API Times simulate(const Table& table);

/// The table with a send right after each action whose result another rank needs, and a receive in that rank's list:
/// behind what it has begun before the data is there, and ahead of the rest. The computing actions and their order stay
/// as they are. The ranks come to the end even if every send waits until its receiver comes to the receive: all lists
/// are cut from one sequence of events, that of simulate(). The same table gives the same lists everywhere.
SHARDWISE_API Table with_transfers(const Table& table);

} // namespace shardwise::pipeline
