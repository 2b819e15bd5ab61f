#pragma once

#include "pipeline/table.h"

namespace shardwise::pipeline {

/// The table with a send right after each action whose result another rank needs, and a receive in that rank's list:
/// behind what it has begun before the data is there, and ahead of the rest. The computing actions and their order stay
/// as they are. The ranks come to the end even if every send waits until its receiver comes to the receive: all lists
/// are cut from one sequence of events, that of simulate(). The same table gives the same lists everywhere. Raises
/// ValueError for a table that has transfers, or that problem_of() finds something wrong with.
SHARDWISE_API Table with_transfers(const Table& table);

} // namespace shardwise::pipeline
