#pragma once

#include <shardwise/detail/export.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace shardwise::engine {

/// Bytes of a group of parameters that travel together.
struct GroupBytes {
  /// Memory from the pool, 0 if there is none: for full copies, for what is gathered before it is copied out, for
  /// the part as it is sent, and for what stays between forward and backward.
  int64_t full = 0;
  /// A gather writes to the full copies, so that they take their memory when it begins, not when it is done.
  bool gathers_into_full = false;
  int64_t gathered = 0;
  int64_t sent = 0;
  int64_t held = 0;
  /// The bucket of gradients, from the pool.
  int64_t bucket = 0;
  /// The result of its sum, which gives its memory back when the next forward reaches the unit.
  int64_t sum = 0;
};

/// One unit of a tree. The outermost has no outer unit and comes last; the others come in the order in which they are
/// made.
struct UnitBytes {
  std::vector<GroupBytes> groups;
  std::optional<size_t> outer;
  bool has_full_copies = false;
  bool reshards_after_forward = true;
  /// Freed full copies keep their memory.
  bool keeps_full = false;
  /// A device runs its sums in a stream.
  bool sums_in_stream = false;
  /// Its full copies come from other ranks, and so can be gathered ahead of their use.
  bool is_gathered = false;
  /// Its gradients are summed with those of other ranks. If not, whole gradients stay until the end of the step.
  bool is_summed = true;
};

/// What happens in a forward, in this order; backward goes through it in reverse.
struct StepEvent {
  enum class Kind { begin, use, end };
  Kind kind;
  size_t unit;
  /// For a use: bytes of the parameter's whole gradient, 0 if it gets none; the number of its group; and whether the
  /// gradient moves into the bucket as soon as it comes.
  int64_t gradient = 0;
  size_t group = 0;
  bool moves_at_once = false;
};

/// The most that the pool, whole gradients and GroupBytes::sum take together, in forward and in backward.
struct StepPeaks {
  int64_t forward = 0;
  int64_t backward = 0;
  /// The most that whole gradients take alone.
  int64_t unsummed_gradients = 0;
  /// What the pool keeps at the end of a step.
  int64_t pool = 0;
};

/// Simulates steps in the engine's order (engine/order.h), with each sum done at the next event, until nothing changes
/// any more. `keeps_idle`: the pool keeps what is not in use, as on a device; if not, that counts as free.
SHARDWISE_API StepPeaks walk_steps(
    const std::vector<UnitBytes>& units, const std::vector<StepEvent>& forward, size_t sums_in_flight = 1,
    bool keeps_idle = true);

} // namespace shardwise::engine
