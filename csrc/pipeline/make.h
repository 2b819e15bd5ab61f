#pragma once

#include "pipeline/table.h"

#include <functional>
#include <string>

namespace shardwise::pipeline {

/// What a schedule is made for. The name is that of the function, for errors.
struct ScheduleShape {
  std::string name;
  int ranks;
  int stages_per_rank;
  int microbatches;
};

/// The table in which each rank has the list that `list_of` makes for it, and each stage is on the rank that `rank_of`
/// says. Raises ValueError for a shape with less than one of anything.
Table make_table(
    const ScheduleShape& shape, const std::function<int(int stage)>& rank_of,
    const std::function<std::vector<Action>(int rank)>& list_of);

} // namespace shardwise::pipeline
