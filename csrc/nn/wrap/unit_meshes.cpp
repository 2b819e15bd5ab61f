#include "nn/wrap/unit_meshes.h"

#include <algorithm>

namespace shardwise::nn {

UnitMeshes::UnitMeshes(const Units& units) {
  for (const auto& unit : units) {
    if (!widest_ || widest_->ranks().world() < unit->ranks().world()) widest_ = unit;
  }
  for (const auto& unit : units) {
    if (is_narrow(unit)) {
      has_narrow_ = true;
      continue;
    }
    const auto same = [&](const auto& other) { return other->shards() == unit->shards(); };
    if (unit->shards().size() > 1 && std::none_of(shards_.begin(), shards_.end(), same)) shards_.push_back(unit);
  }
}

} // namespace shardwise::nn
