#pragma once

#include "transport/same_host/arena.h"
#include "transport/same_host/step_barrier.h"

#include <shardwise/export.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace shardwise::transport::same_host {

/// The ranks of a process group, which all can read each other's arenas, and this rank's board.
class SHARDWISE_API HostGroup {
 public:
  /// All ranks of `gloo`, on which nothing else is under way, come here; gives the host of each. `members` are null,
  /// for all of them, where one does not want it, is on another `host`, or cannot read another's memory. Raises what
  /// Gloo raises where a rank does not come.
  struct Meeting {
    std::shared_ptr<HostGroup> members;
    std::vector<std::string> hosts;
  };
  static Meeting meet(c10d::Backend& gloo, bool wanted, const std::string& host, std::chrono::milliseconds timeout);

  const Arena& arena() const {
    return *arena_;
  }
  const Segment& board() const {
    return board_;
  }
  /// By rank, this one too.
  const std::vector<Peer>& peers() const {
    return peers_;
  }

 private:
  HostGroup(std::shared_ptr<Arena> arena, Segment board, std::vector<Peer> peers);

  std::shared_ptr<Arena> arena_;
  Segment board_;
  std::vector<Peer> peers_;
};

} // namespace shardwise::transport::same_host
