#pragma once

#include "transport/same_host/arena.h"
#include "transport/same_host/step_barrier.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace shardwise::transport::same_host {

/// The ranks of a process group that can all read each other's arenas, and this rank's board.
struct HostGroup {
  /// The result of discover(), which all ranks of `gloo` call while nothing else is under way on it: the host of each
  /// rank, and the group. `members` is null on all ranks if one of them does not want shared memory, is on another
  /// host, or cannot read another's memory. Raises Gloo's error if a rank does not come.
  struct Discovery {
    std::shared_ptr<HostGroup> members;
    std::vector<std::string> hosts;
    /// A random number chosen by the first rank, to tell this group from others.
    uint64_t word = 0;
  };
  static Discovery discover(
      c10d::Backend& gloo, bool wanted, const std::string& host, std::chrono::milliseconds timeout);

  std::shared_ptr<Arena> arena;
  Segment board;
  /// One for each rank, this one included.
  std::vector<Peer> peers;
};

} // namespace shardwise::transport::same_host
