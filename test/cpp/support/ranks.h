#pragma once

#include "support/rank.h"

#include <functional>
#include <stdexcept>

namespace shardwise::test {

/// The error of the rank that failed first: "rank 1 of 2: ..." with that rank's text, then the other ranks that failed.
class RankFailure : public std::runtime_error {
 public:
  RankFailure(int rank, const std::string& text, std::exception_ptr cause)
      : std::runtime_error(text),
        rank_(rank),
        cause_(std::move(cause)) {}
  int rank() const {
    return rank_;
  }
  /// What the rank threw. Null when a fatal assertion of GoogleTest ended it.
  const std::exception_ptr& cause() const {
    return cause_;
  }

 private:
  int rank_;
  std::exception_ptr cause_;
};

/// Runs fn on n threads, one a rank, over one store in memory, and waits for all of them.
///
/// Assertions of GoogleTest may be used in fn; they name the rank. GTEST_SKIP may not. A rank that throws, or that an
/// ASSERT_ ends, has failed: its meshes are closed, so that the others do not wait for it, and run_ranks raises
/// RankFailure. The first to fail is the one that is told, but an error that only says that a peer is gone gives way to
/// any other.
/// Random numbers: pass Rank::generator(). For dropout, and for ranks that die, use run_processes.
void run_ranks(int n, const std::function<void(Rank&)>& fn, const RankOptions& options = {});

} // namespace shardwise::test
