#pragma once

#include "engine/front_end.h"

#include <memory>
#include <vector>

namespace shardwise::nn {

/// Over which ranks a number of all these units' parameters is combined, so that all ranks know it.
///
/// Ranks that hold shards have different parts of it. Units on a mesh of fewer ranks than the widest, as those of
/// experts are, are taken to differ between the meshes of that kind: their part is combined over the widest one.
class UnitMeshes {
 public:
  using Units = std::vector<std::shared_ptr<engine::Unit>>;
  explicit UnitMeshes(const Units& units);

  /// Whether it lies on fewer ranks than the widest, but not on this rank alone. Of a null unit: no.
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
  /// Of all ranks. Null if there is no unit.
  const std::shared_ptr<engine::Unit>& widest() const {
    return widest_;
  }

 private:
  std::shared_ptr<engine::Unit> widest_;
  Units shards_;
  bool has_narrow_ = false;
};

} // namespace shardwise::nn
