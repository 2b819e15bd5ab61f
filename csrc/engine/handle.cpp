#include "engine/unit.h"

#include <shardwise/unit.h>

namespace shardwise {

Unit::Unit(std::shared_ptr<engine::Unit> unit) : unit_(std::move(unit)) {}

const std::string& Unit::name() const {
  return unit_->name();
}

Unit& Unit::set_requires_gradient_sync(bool value, bool recurse) {
  unit_->set_sync(value, recurse);
  return *this;
}

bool Unit::requires_gradient_sync() const {
  return unit_->sync();
}

Plan Unit::plan() const {
  return unit_->plan();
}

Counters Unit::counters() const {
  return unit_->counters();
}

} // namespace shardwise
