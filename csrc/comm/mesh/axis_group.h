#pragma once

#include <shardwise/export.h>
#include <shardwise/mesh.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace shardwise::comm {

/// Maps positions in a process group to rank numbers in the mesh, which errors show.
struct Ranks {
  int64_t first = 0;
  int64_t stride = 1;

  int64_t operator[](int64_t position) const {
    return first + position * stride;
  }
};

/// The ranks that differ from this one only along one axis of a mesh.
struct AxisGroup {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  Ranks ranks;
};

/// Raises ValueError for an axis that the mesh does not have.
SHARDWISE_API AxisGroup axis_group_of(const Mesh& mesh, const std::string& axis);

/// One for each axis.
SHARDWISE_API std::vector<AxisGroup> axis_groups_of(const Mesh& mesh);

} // namespace shardwise::comm
