#pragma once

#include "pipeline/table.h"

#include <string>

namespace shardwise::pipeline {

/// What is wrong with a table, with or without transfers, in words that name the rank and the action; "" if nothing is.
/// In a right table
/// - each stage takes each microbatch forward once and backward once, as a whole or as one half on the input and later
///   one on the weights, on the rank that has the stage;
/// - no rank does anything before what it needs, and the ranks come to the end of their lists;
/// - if there are transfers, there is one for each result that another rank needs, and the ranks come to the end even
///   where every send waits until its receiver comes to the receive.
SHARDWISE_API std::string problem_of(const Table& table);

/// Raises ValueError if problem_of() finds something.
void check_schedule(const Table& table);

} // namespace shardwise::pipeline
