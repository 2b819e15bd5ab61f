#include "comm/mesh/mesh_options.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <set>
#include <string>

namespace shardwise::comm {

Environment environment_of(const MeshOptions& options) {
  if (!options.store()) {
    if (options.rank() != -1 || options.world_size() != -1) {
      throw ValueError(c10::str(
          "shardwise: MeshOptions has rank ", options.rank(), " and world_size ", options.world_size(),
          ", but no store; set a store that all ranks share, or set none of the three to use the environment."));
    }
    return Environment::read();
  }
  Environment env;
  env.rank = options.rank();
  env.world_size = options.world_size();
  if (env.rank < 0 || env.rank >= env.world_size) {
    throw ValueError(c10::str(
        "shardwise: MeshOptions has a store, rank ", env.rank, " and world_size ", env.world_size,
        "; with a store, set world_size, and a rank from 0 to world_size - 1."));
  }
  return env;
}

void check_axes(const std::vector<Axis>& axes) {
  if (axes.empty()) throw ValueError("shardwise: a mesh needs at least one axis, and got none.");
  std::set<std::string> names;
  int64_t product = 1;
  for (const auto& axis : axes) {
    if (axis.name.empty()) throw ValueError("shardwise: an axis of a mesh has an empty name. Give every axis a name.");
    if (axis.size < 1) {
      throw ValueError(
          c10::str("shardwise: the axis '", axis.name, "' has size ", axis.size, "; it must be 1 or more."));
    }
    if (!names.insert(axis.name).second) {
      throw ValueError(c10::str("shardwise: two axes of the mesh are called '", axis.name, "'; names must differ."));
    }
    if (__builtin_mul_overflow(product, axis.size, &product)) {
      throw ValueError(
          c10::str("shardwise: the sizes of the mesh, with ", axis.size, " for '", axis.name, "', are too large."));
    }
  }
}

} // namespace shardwise::comm
