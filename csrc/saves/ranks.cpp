#include "saves/ranks.h"

#include "base/caller.h"
#include "base/reason.h"
#include "comm/mesh/axis_group.h"
#include "comm/mesh/gather_texts.h"
#include "comm/rendezvous/environment.h"
#include "files/disk.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <exception>
#include <utility>

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

std::vector<std::string> Ranks::together(const std::function<std::string()>& act) const {
  constexpr char kWell = '+';
  constexpr char kFailed = '!';
  std::string mine;
  std::exception_ptr own;
  try {
    mine = kWell + act();
  } catch (const std::exception& error) {
    own = std::current_exception();
    mine = kFailed + base::text_of(error);
  }
  // A rank that failed comes too: the others wait for it.
  auto texts = exchange_ ? exchange_(mine) : std::vector<std::string>{mine};
  if (own) std::rethrow_exception(own);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].starts_with(kFailed)) throw Error(c10::str("on rank ", rank, ": ", texts[rank].substr(1)));
  }
  for (auto& text : texts) text.erase(0, 1);
  return texts;
}

void Ranks::agree_on_place(const std::string& place, const std::string& verb) const {
  const auto places = together([&] { return files::without_slashes(place); });
  for (size_t rank = 0; rank < places.size(); ++rank) {
    if (places[rank] == places.front()) continue;
    throw Error(c10::str(
        "shardwise: rank ", rank, " ", verb, " ", places[rank], ", but rank 0 ", verb, " ", places.front(),
        ". All ranks must name the same place, which all of them can reach."));
  }
}

Ranks ranks_on(const Mesh& mesh, const std::string& function) {
  return ranks_over(mesh, comm::axis_groups_of(mesh), mesh.device(), "an exchange of " + function);
}

Ranks ranks_on_save_groups(const Mesh& mesh) {
  auto groups = comm::axis_groups_of(mesh);
  for (size_t i = 0; i < groups.size(); ++i) groups[i].group = comm::MeshGroups::save(mesh, mesh.axes()[i].name);
  return ranks_over(mesh, groups, at::kCPU, "an exchange of a save in the background");
}

std::optional<Mesh> mesh_of(
    const nn::ModuleState& module, const std::optional<Mesh>& mesh, const std::string& function) {
  const auto& meshes = module.meshes();
  if (meshes.size() > 1) {
    throw ValueError(c10::str(
        "shardwise: ", function, "(): the units of this module lie on ", meshes.size(),
        " meshes, such as those of experts. Tensors of one name may differ between them, so one checkpoint cannot "
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
