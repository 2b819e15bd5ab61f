#include "saves/mesh_ranks.h"

#include "base/caller_lock.h"
#include "comm/mesh/axis_group.h"
#include "comm/mesh/messages.h"

#include <utility>
#include <vector>

namespace shardwise::saves {
namespace {

Ranks ranks_over(
    const Mesh& mesh, const std::vector<comm::AxisGroup>& groups, at::Device device, const std::string& what) {
  std::vector<comm::Collectives> axes(groups.begin(), groups.end());
  auto exchange = [axes = std::move(axes), mesh, device, what](const std::string& mine) {
    const base::WithoutCallerLock unlocked;
    Counters counters;
    return comm::gather_texts(mine, axes, device, what, counters);
  };
  return {mesh.rank(), mesh.size(), std::move(exchange)};
}

} // namespace

Ranks ranks_on(const Mesh& mesh, const std::string& function) {
  return ranks_over(mesh, comm::axis_groups_of(mesh), mesh.device(), "an exchange of " + function);
}

Ranks ranks_beside(const Mesh& mesh) {
  auto groups = comm::axis_groups_of(mesh);
  for (size_t i = 0; i < groups.size(); ++i) groups[i].group = mesh.save_group(mesh.axes()[i].name);
  return ranks_over(mesh, groups, at::kCPU, "an exchange of a save in the background");
}

} // namespace shardwise::saves
