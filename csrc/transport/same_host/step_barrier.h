#pragma once

#include "transport/progress.h"
#include "transport/same_host/control_block.h"
#include "transport/same_host/peer.h"

#include <string>
#include <vector>

namespace shardwise::transport::same_host {

/// The ranks of a process group go through their collectives step by step: what a rank wrote before it took a step, the
/// others see once they waited for it. One thread takes them.
class StepBarrier {
 public:
  /// `peers` has an entry for this rank too.
  StepBarrier(Progress& progress, const Segment& board, const std::vector<Peer>& peers);

  /// Tells all who wait.
  void take();
  /// Returns when all have taken as many steps. Fails the progress where one is late, dead or does not go on.
  void wait();
  void take_and_wait() {
    take();
    wait();
  }
  /// After the last step of a collective whose data was read in place: fails the progress where that may have been
  /// given up by its rank before it was read.
  void require_whole();
  /// Tells the peers that this rank goes no further, and why. Comes before any memory is given up that they may read.
  void end() noexcept;

 private:
  const RankState& of(size_t peer) const;
  bool has_come(size_t peer) const;
  void require_to_go_on(size_t peer);
  void look_around(size_t awaited);

  Progress& progress_;
  RankState& own_;
  const std::vector<Peer>& peers_;
  uint32_t steps_ = 0;
};

} // namespace shardwise::transport::same_host
