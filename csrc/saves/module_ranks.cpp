#include "saves/module_ranks.h"

#include "comm/meet/environment.h"
#include "comm/mesh/messages.h"
#include "saves/mesh_ranks.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <utility>

namespace shardwise::saves {
namespace {

/// The mesh that parallelize() got, if it has all ranks that hold parts of the module.
Mesh whole_mesh(const nn::ModuleState& module, const std::string& function) {
  const auto& axis = *module.axes().front();
  const auto replicas = module.meshes().empty() ? 1 : module.meshes().front()->ranks().world();
  if (module.axes().size() == 1 && axis.mesh.size() >= replicas * axis.ranks.size()) return axis.mesh;
  throw ValueError(c10::str(
      "shardwise: ", function, "(): parallelize() divided this module over ", axis.ranks.size(), " ranks of ",
      axis.mesh.describe(), ", and its units lie on ", replicas,
      " ranks beside that. Name the mesh of all ranks in the options, with mesh()."));
}

} // namespace

std::optional<Mesh> mesh_of(
    const nn::ModuleState& module, const std::optional<Mesh>& mesh, const std::string& function) {
  const auto& meshes = module.meshes();
  if (meshes.size() > 1) {
    throw ValueError(c10::str(
        "shardwise: ", function, "(): the units of this module lie on ", meshes.size(),
        " meshes, such as those of experts. Tensors of one name may differ between them, so that one checkpoint cannot "
        "have them all. Save the parts that lie on one mesh to folders of their own."));
  }
  if (mesh) return mesh;
  if (!module.axes().empty()) return whole_mesh(module, function);
  if (!meshes.empty()) return meshes.front()->mesh();
  if (const auto world = comm::Environment::read().world_size; world > 1 && function == "save") {
    throw ValueError(c10::str(
        "shardwise: save(): this module has no units, so nothing says which ranks save it together, and the program "
        "has ",
        world,
        " ranks. Name their mesh in the options, with mesh(): otherwise the ranks would write over each other."));
  }
  return std::nullopt;
}

Ranks ranks_of(const nn::ModuleState& module, const std::optional<Mesh>& mesh, const std::string& function) {
  const auto on = mesh_of(module, mesh, function);
  if (!on) return {};
  if (mesh || !module.axes().empty()) return ranks_on(*on, function);
  auto exchange = [unit = module.meshes().front(), what = "an exchange of " + function](const std::string& mine) {
    return comm::gather_texts(mine, unit->ranks().axes(), unit->mesh().device(), what, unit->own_counters());
  };
  return {on->rank(), on->size(), std::move(exchange)};
}

} // namespace shardwise::saves
