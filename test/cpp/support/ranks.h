#pragma once

#include "support/rank.h"

#include <functional>

namespace shardwise::test {

/// Runs fn on n threads, one a rank, over one store in memory, and waits for all of them.
///
/// Assertions of GoogleTest may be used in fn; they name the rank. GTEST_SKIP may not. A rank that throws, or that an
/// ASSERT_ ends, has failed: its meshes are closed, so that the others do not wait for it, and run_ranks raises
/// a std::runtime_error: "rank 1 of 2: ..." with that rank's text, then the other ranks that failed. The first to fail
/// is told first, but an error that only says that a peer is gone gives way to any other. The default generator belongs
/// to the process (T21): threads must not use it. For dropout, and for ranks that die, use run_processes.
void run_ranks(int n, const std::function<void(Rank&)>& fn, std::chrono::milliseconds timeout = kMeshTimeout);

} // namespace shardwise::test
