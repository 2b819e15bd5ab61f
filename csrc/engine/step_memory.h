#pragma once

#include <shardwise/export.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace shardwise::engine {

/// Bytes of a group of parameters that travel together.
struct GroupBytes {
  /// Of full copies, of what is gathered before it is copied out, of the part as it is sent, of what is kept of it
  /// between forward and backward: all from the pool, or 0 where there is none.
  int64_t full = 0;
  int64_t gathered = 0;
  int64_t sent = 0;
  int64_t held = 0;
  /// Of the bucket of gradients, from the pool.
  int64_t bucket = 0;
};

/// One unit of a tree. The outermost has no outer one and comes last; the others in the order in which they are made.
struct UnitBytes {
  std::vector<GroupBytes> groups;
  std::optional<size_t> outer;
  bool has_full_copies = false;
  bool reshards_after_forward = true;
  /// Its full copies are gathered from other ranks, and so ahead of their use.
  bool is_gathered = false;
  /// Its gradients are summed with those of others; if not, whole ones are what is left in the end.
  bool is_summed = true;
};

/// What happens in a forward, in this order; in backward it is the other way round.
struct StepEvent {
  enum class Kind { begin, use, end };
  Kind kind;
  size_t unit;
  /// Of a use: bytes of the whole gradient of the parameter, 0 where it has none.
  int64_t gradient = 0;
};

/// The most that the pool and whole gradients take together.
struct StepPeaks {
  int64_t forward = 0;
  int64_t backward = 0;
  /// Of whole gradients alone.
  int64_t local_gradients = 0;
  /// What the pool keeps in the end.
  int64_t pool = 0;
};

/// Goes through steps in the engine's own order (engine/order.h), with sums that are done at the next event, until the
/// pool grows no more.
SHARDWISE_API StepPeaks walk_steps(const std::vector<UnitBytes>& units, const std::vector<StepEvent>& forward);

} // namespace shardwise::engine
