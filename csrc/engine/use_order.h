#pragma once

#include "engine/pass_order.h"

#include <cstdint>
#include <memory>

namespace shardwise::engine {

class Unit;

/// The order in which a forward, or a backward, used the units that were gathered for it; and so which one comes next.
/// It follows from the gathers alone, which are the same on all ranks. Keeps no unit alive.
class UseOrder {
 public:
  /// The unit is used, and was gathered for it. Returns the one that came next in the pass before; null when none did.
  std::shared_ptr<Unit> used(const std::shared_ptr<Unit>& unit);
  /// Whether a pass seems to begin anew with this unit: it ran in this one, and is not what comes next.
  bool comes_round(const Unit& unit) const;
  /// The pass is over. One without gathers does not count.
  void end_pass() {
    order_.end_pass();
  }
  /// The pass failed.
  void forget_pass() {
    order_.forget_pass();
  }

 private:
  struct Use {
    int64_t number;
    std::weak_ptr<Unit> unit;
    bool operator==(const Use& other) const {
      return number == other.number;
    }
  };

  PassOrder<Use> order_;
};

} // namespace shardwise::engine
