#include "saves/module_ranks.h"

#include "comm/messages.h"
#include "saves/mesh_ranks.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <utility>

namespace shardwise::saves {
std::optional<Mesh> mesh_of(
    const nn::ModuleState& module, const std::optional<Mesh>& mesh, const std::string& function) {
  const auto& meshes = module.meshes();
  if (meshes.size() > 1) {
    throw ValueError(c10::str(
        "shardwise: ", function, "(): the units of this module lie on ", meshes.size(),
        " meshes, such as those of experts. Tensors of one name may differ between them, so that one checkpoint cannot "
        "have them all. Save the parts that lie on one mesh to folders of their own."));
  }
  if (mesh || meshes.empty()) return mesh;
  return meshes.front()->mesh();
}

Ranks ranks_of(const nn::ModuleState& module, const std::optional<Mesh>& mesh, const std::string& function) {
  const auto on = mesh_of(module, mesh, function);
  if (!on) return {};
  if (mesh) return ranks_on(*mesh, function);
  auto exchange = [unit = module.meshes().front(), what = "an exchange of " + function](const std::string& mine) {
    return comm::gather_texts(mine, unit->ranks().axes(), unit->mesh().device(), what, unit->own_counters());
  };
  return {on->rank(), on->size(), std::move(exchange)};
}

} // namespace shardwise::saves
