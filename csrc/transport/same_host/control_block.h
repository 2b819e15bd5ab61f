#pragma once

#include "transport/same_host/segment.h"
#include "transport/signature.h"
#include "transport/tuning.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace shardwise::transport::same_host {

/// What stands first on a rank's board: how far it is.
struct RankState {
  /// StepBarrier that it has taken in all collectives so far, modulo 2^32. Those who wait for it sleep on this word.
  std::atomic<uint32_t> step;
  /// The first collective that it does not carry out any more, counted from 1; 0 as long as there is none.
  std::atomic<uint64_t> ended_at;
  /// Why; ends with a zero.
  std::array<char, 1000> reason;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

/// Where a rank's data lies that does not lie in its arena.
constexpr uint64_t kNowhere = UINT64_MAX;

/// What a rank shows the others of one process group, in a segment, and where: what is said twice in a row has two
/// places, for it may still be read when the next is written.
class ControlBlock {
 public:
  /// Bytes of one stage, through which tensors go that lie outside of the arena.
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
  /// What `peer` is to read: an offset in the arena, or kNowhere.
  size_t offset_for(uint64_t collective, int peer) const {
    return signature(collective) + kSignature + static_cast<size_t>(peer) * sizeof(uint64_t);
  }
  /// What `peer` is to read where that is little: up to kInline bytes.
  size_t inlined(uint64_t collective, int peer) const {
    return signature(collective) + whole_lines(kSignature + world_ * sizeof(uint64_t)) +
           static_cast<size_t>(peer) * kInline;
  }
  size_t stage(uint64_t piece) const {
    return kProgress + 2 * announcement() + (piece % 2) * kStage;
  }
  /// Bytes of a stage for each rank.
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

} // namespace shardwise::transport::same_host
