#pragma once

#include "transport/progress.h"
#include "transport/same_host/segment.h"
#include "transport/signature.h"
#include "transport/tuning.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardwise::transport::same_host {

/// The first entry on a rank's board: how far the rank has come.
struct RankState {
  /// Steps the rank has taken in all collectives so far, modulo 2^32. Ranks that wait for it sleep on this word.
  std::atomic<uint32_t> step;
  /// The first collective that the rank does not complete, counted from 1; 0 while there is none.
  std::atomic<uint64_t> ended_at;
  /// Why, zero-terminated; empty if the rank was shut down.
  std::array<char, 1000> reason;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

/// The offset for data that does not lie in the rank's arena.
constexpr uint64_t kNowhere = UINT64_MAX;

/// The layout of a rank's board: the segment in which it shows the other ranks of a process group its state, calls and
/// data. Successive collectives (and staged pieces) alternate between two places, since the last one may still be read
/// while the next is written.
class ControlBlock {
 public:
  /// The size of a stage, through which tensors outside the arena pass.
  static constexpr size_t kStage = 2097152;

  explicit ControlBlock(int world) : world_(static_cast<size_t>(world)) {}

  size_t bytes() const {
    return stage(1) + kStage;
  }
  static size_t progress() {
    return Segment::kMark;
  }
  size_t signature(uint64_t collective) const {
    return kProgress + (collective % 2) * announcement();
  }
  /// What `peer` should read: an offset in the arena, or kNowhere.
  size_t offset_for(uint64_t collective, int peer) const {
    return signature(collective) + kSignature + static_cast<size_t>(peer) * sizeof(uint64_t);
  }
  /// Small data for `peer`: up to kInline bytes.
  size_t inlined(uint64_t collective, int peer) const {
    return signature(collective) + whole_lines(kSignature + world_ * sizeof(uint64_t)) +
           static_cast<size_t>(peer) * kInline;
  }
  size_t stage(uint64_t piece) const {
    return kProgress + 2 * announcement() + (piece % 2) * kStage;
  }
  /// The bytes of a stage that each rank has.
  size_t piece() const {
    return kStage / world_ / kCacheLine * kCacheLine;
  }

 private:
  static constexpr size_t kProgress = Segment::kMark + whole_lines(sizeof(RankState));
  static constexpr size_t kSignature = whole_lines(sizeof(Signature));
  size_t announcement() const {
    return whole_lines(kSignature + world_ * sizeof(uint64_t)) + world_ * kInline;
  }

  size_t world_;
};

/// Steps that the ranks of a process group take together: whatever a rank wrote before it took a step is visible to
/// ranks that waited for that step. One thread uses it.
class StepBarrier {
 public:
  /// `peers` includes this rank.
  StepBarrier(Progress& progress, const Segment& board, const std::vector<Peer>& peers);

  /// Takes a step, wakes the ranks that wait for it, and returns when all have taken as many steps as this one. Fails
  /// the progress if a rank is late, dead or has stopped.
  void take_and_wait();
  /// Call this after the last step of a collective whose data was read in place: fails the progress if a rank may have
  /// freed its memory before it was read.
  void require_all_running();
  /// Tells the peers that this rank goes no further, and why. Must come before any memory is freed that they may read.
  void end() noexcept;

 private:
  const RankState& of(int peer) const;
  bool has_arrived(int peer) const;
  void require_running(int peer);
  void check_peers(int awaited);

  Progress& progress_;
  RankState& own_;
  const std::vector<Peer>& peers_;
  uint32_t steps_ = 0;
};

} // namespace shardwise::transport::same_host
