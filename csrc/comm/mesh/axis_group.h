#pragma once

#include <shardwise/detail/export.h>
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

/// The process groups of a mesh that the library makes for itself, of the same ranks as group(). Each is made at the
/// first call, which all ranks make together.
struct SHARDWISE_API MeshGroups {
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  /// For the gathers and for the sums of units, so that what a program itself sends on group() may come between these
  /// in any order. They are group() itself if that is the caller's and has no store that works.
  static Group gather(const Mesh& mesh, const std::string& axis);
  static Group sum(const Mesh& mesh, const std::string& axis);
  /// For saves that are written while training goes on (AsyncSaver). This and the others raise Error if the groups are
  /// the caller's and have no store that works.
  static Group save(const Mesh& mesh, const std::string& axis);
  /// For what the stages of a Pipeline send each other.
  static Group transfer(const Mesh& mesh, const std::string& axis);
  /// Of `count` ranks in a row along that axis, this one among them: those whose coordinates give the same result when
  /// divided by `count`, a divisor of the axis's size.
  static Group neighbours(const Mesh& mesh, const std::string& axis, int64_t count);

  /// The ranks along an axis.
  static Ranks line(const Mesh& mesh, const std::string& axis);
};

} // namespace shardwise::comm
