#pragma once

#include "pipeline/table.h"

#include <vector>

namespace shardwise::pipeline {

/// How long things take, in any unit. A whole backward takes as long as its halves together.
struct Costs {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
  /// From one rank to another, for an activation or a gradient.
  double transfer = 0;
};

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

/// The times when every rank works through its list as early as it can. A transfer keeps no rank from going on: a send
/// ends as it begins, a receive ends when its data is there, and only what uses the data waits for it. The data travels
/// from when both ranks have come to the transfer; in a table without transfers, from when it is computed.
/// Raises ValueError for a table that problem_of() finds something wrong with.
SHARDWISE_API Times simulate(const Table& table, const Costs& costs = {});

} // namespace shardwise::pipeline
