#pragma once

#include "pipeline/table.h"

#include <cstddef>
#include <vector>

namespace shardwise::pipeline {

/// The action of_rank[rank][index].
struct TableEntry {
  int rank;
  size_t index;
};

/// An order in which the ranks can carry out all of a table, each strictly in its own order and each action after what
/// it needs. A send waits until the other rank comes to the receive, which then follows the send. Where the ranks get
/// stuck, the rest is missing.
/// The stages and microbatches of the actions must be ones that the table has.
std::vector<TableEntry> order_of(const Table& table);

} // namespace shardwise::pipeline
