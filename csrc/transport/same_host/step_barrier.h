#pragma once

#include "transport/progress.h"
#include "transport/same_host/control_block.h"
#include "transport/same_host/peer.h"

#include <string>
#include <vector>

namespace shardwise::transport::same_host {

/// Steps that the ranks of a process group take together: whatever a rank wrote before it took a step is visible to
/// ranks that waited for that step. One thread uses it.
class StepBarrier {
 public:
  /// `peers` includes this rank.
  StepBarrier(Progress& progress, const Segment& board, const std::vector<Peer>& peers);

  /// Takes a step, and wakes the ranks that wait for it.
  void take();
  /// Returns when all ranks have taken as many steps as this one. Fails the progress if a rank is late, dead or has
  /// stopped.
  void wait();
  void take_and_wait() {
    take();
    wait();
  }
  /// Call this after the last step of a collective whose data was read in place: fails the progress if a rank may have
  /// freed its memory before it was read.
  void require_whole();
  /// Tells the peers that this rank goes no further, and why. Must come before any memory is freed that they may read.
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
