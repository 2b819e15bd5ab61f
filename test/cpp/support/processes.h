#pragma once

#include "support/command.h"
#include "support/rank.h"

#include <filesystem>
#include <functional>
#include <set>
#include <string>

namespace shardwise::test {

struct ProcessOptions {
  /// Changes to the environment of the ranks.
  Environment environment;
  /// Ranks that may end as they like. A failure of any other fails the test and shows its output.
  std::set<int> may_fail;
};

/// Runs fn in n processes, one a rank, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set; gives how each ended.
///
/// Each process is this program started again for the running test alone: what the test does before this call happens
/// there too, and the call runs fn and ends the process, with exit code 1 if fn threw or an assertion failed in it.
/// So a test calls it once. Rank::store() is served by the parent and outlives every rank; port MASTER_PORT is free.
std::vector<Ended> run_processes(int n, const std::function<void(Rank&)>& fn, const ProcessOptions& options = {});

/// This program again, for the running test alone. Not run_processes: the test itself says what it does there.
Command this_test(const Environment& environment = {});

/// As run_commands(), until the time limit of tests.
std::vector<Ended> run_limited(const std::vector<Command>& commands);

/// Python with torch. Launchers that packages brought lie beside it.
std::filesystem::path python();

/// Whether this process is a rank that run_processes started.
bool is_rank_process();

} // namespace shardwise::test
