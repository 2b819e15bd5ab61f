#include "engine/use_order.h"

#include "engine/unit.h"

namespace shardwise::engine {

std::shared_ptr<Unit> UseOrder::used(const std::shared_ptr<Unit>& unit) {
  const auto* next = order_.used({unit->number(), unit});
  return next == nullptr ? nullptr : next->unit.lock();
}

bool UseOrder::comes_round(const Unit& unit) const {
  return order_.comes_round({unit.number(), {}});
}

} // namespace shardwise::engine
