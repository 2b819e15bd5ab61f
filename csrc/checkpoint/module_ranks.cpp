#include "checkpoint/module_ranks.h"

#include "comm/axis_group.h"
#include "comm/messages.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

namespace shardwise::checkpoint {
namespace {

Ranks ranks_on(const Mesh& mesh, const std::string& function) {
  std::vector<comm::Collectives> axes;
  for (const auto& axis : comm::axis_groups_of(mesh)) axes.emplace_back(axis);
  auto exchange = [axes = std::move(axes), mesh, what = "an exchange of " + function](const std::string& mine) {
    Counters counters;
    return comm::gather_texts(mine, axes, mesh.device(), what, counters);
  };
  return {mesh.rank(), mesh.size(), std::move(exchange)};
}

} // namespace

Ranks ranks_of(const nn::ModuleState& module, const std::optional<Mesh>& mesh, const std::string& function) {
  const auto& meshes = module.meshes();
  if (meshes.size() > 1) {
    throw ValueError(c10::str(
        "shardwise: ", function, "(): the units of this module lie on ", meshes.size(),
        " meshes, such as those of experts. Tensors of one name may differ between them, so that one checkpoint cannot "
        "have them all. Save the parts that lie on one mesh to folders of their own."));
  }
  if (mesh) return ranks_on(*mesh, function);
  if (meshes.empty()) return {};
  const auto& unit = meshes.front();
  auto exchange = [unit, what = "an exchange of " + function](const std::string& mine) {
    return comm::gather_texts(mine, unit->ranks().axes(), unit->mesh().device(), what, unit->own_counters());
  };
  return {unit->mesh().rank(), unit->ranks().world(), std::move(exchange)};
}

} // namespace shardwise::checkpoint
