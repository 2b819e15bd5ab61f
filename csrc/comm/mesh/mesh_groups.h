#pragma once

#include "comm/mesh/axis_group.h"

#include <shardwise/export.h>
#include <shardwise/mesh.h>

namespace shardwise::comm {

/// The process groups of a mesh that the library makes for itself, of the same ranks as group(). Each is made at the
/// first call, which all ranks make together.
struct SHARDWISE_API MeshGroups {
  using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

  /// For the gathers and for the sums of units, so that what a program itself sends on group() may come between these
  /// in any order. They are group() itself if that is the caller's and has no store that works.
  static Group gather(const Mesh& mesh, const std::string& axis);
  static Group sum(const Mesh& mesh, const std::string& axis);
  /// For saves that are written while training goes on (Saver). This and the others raise Error if the groups are the
  /// caller's and have no store that works.
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
