#pragma once

#include "engine/front_end.h"

#include <memory>
#include <vector>

namespace shardwise::nn {

/// The ranks over which a number of all these units' parameters, such as a norm, is combined, so that all ranks know
/// it.
///
/// Ranks that hold shards have different parts of it. Units on a mesh of fewer ranks than the widest, such as experts,
/// count as different from those on other meshes like it: their parts are combined over the widest mesh.
class UnitMeshes {
 public:
  using Units = std::vector<std::shared_ptr<engine::Unit>>;
  explicit UnitMeshes(const Units& units);

  /// Whether the unit lies on fewer ranks than the widest, but not on this rank alone. False for a null unit.
  bool is_narrow(const std::shared_ptr<engine::Unit>& unit) const {
    return unit && unit->ranks().world() > 1 && unit->ranks().world() < widest_->ranks().world();
  }
  /// A unit of each process group of shards, without the narrow ones.
  const Units& shards() const {
    return shards_;
  }
  bool has_narrow() const {
    return has_narrow_;
  }
  /// The unit with most ranks; null if there is no unit.
  const std::shared_ptr<engine::Unit>& widest() const {
    return widest_;
  }

 private:
  std::shared_ptr<engine::Unit> widest_;
  Units shards_;
  bool has_narrow_ = false;
};

} // namespace shardwise::nn
