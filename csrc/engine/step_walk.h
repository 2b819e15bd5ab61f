#pragma once

#include "engine/order.h"

#include <cstddef>
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
  /// What each rank has for the others in a gather.
  int64_t part = 0;
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
  /// For a use: what is computed with the parameter, in any measure.
  double work = 0;
};

/// Takes a tree through steps in the engine's order (engine/order.h), without tensors. Derived classes carry out its
/// actions on numbers.
class StepWalk : protected Performer {
 protected:
  StepWalk(const std::vector<UnitBytes>& units, const std::vector<StepEvent>& events, size_t sums_in_flight);

  void forward();
  void backward();
  /// A parameter is used in forward, or backward comes to it.
  virtual void use(const StepEvent& event) = 0;
  bool in_backward() const {
    return in_backward_;
  }
  /// A gradient is about to arrive: whether the next sum to start is this unit's.
  bool is_next(UnitId unit) {
    return order_.is_next(unit, kBackward, *this);
  }
  const std::vector<UnitBytes>& units() const {
    return units_;
  }

 private:
  static constexpr Order::Moment kBackward{.backward = 0, .with_gradients = false};

  const std::vector<UnitBytes>& units_;
  const std::vector<StepEvent>& events_;
  Order order_;
  bool in_backward_ = false;
};

} // namespace shardwise::engine
