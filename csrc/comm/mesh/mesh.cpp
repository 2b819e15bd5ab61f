#include "comm/mesh/mesh_groups.h"
#include "comm/mesh/mesh_state.h"
#include "comm/rendezvous/environment.h"

#include <shardwise/error.h>
#include <shardwise/mesh.h>

#include <c10/util/StringUtil.h>

#include <csignal>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace shardwise::comm {
namespace {

/// This rank and the world size, from the options if they have a store, else from the environment. Raises ValueError.
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

/// Raises ValueError for axes that are not allowed.
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

/// Writing to a peer that is gone becomes an error, unless the program has set something for SIGPIPE itself.
void ignore_broken_pipes() {
  struct sigaction current {};
  if (sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

} // namespace

} // namespace shardwise::comm

namespace shardwise {

Mesh::Mesh(std::shared_ptr<State> state) : state_(std::move(state)) {}

Mesh Mesh::from_env(const MeshOptions& options) {
  return Mesh({{"world", comm::environment_of(options).world_size}}, options);
}

Mesh::Mesh(std::vector<Axis> axes, const MeshOptions& options) : state_(std::make_shared<State>()) {
  comm::check_axes(axes);
  state_->axes = std::move(axes);
  const auto env = comm::environment_of(options);
  state_->rank = env.rank;
  state_->device = options.device() ? *options.device() : at::Device(comm::usual_device());
  if (!state_->device.has_index()) state_->device = env.device(state_->device.type());
  if (state_->size() != env.world_size) {
    throw ValueError(c10::str(
        "shardwise: the sizes of ", state_->describe(), " multiply to ", state_->size(), ", but the world has ",
        env.world_size, " ranks (", options.store() ? "MeshOptions().world_size()" : "WORLD_SIZE", ")."));
  }
  comm::ignore_broken_pipes();
  auto store = options.store();
  if (!store) {
    state_->claim = comm::claim_environment();
    store = env.connect(options.connect_timeout());
  }
  state_->options = options;
  state_->connect(store);
  if (options.store()) return;
  auto& holder = State::from_environment();
  const std::lock_guard lock(holder.mutex);
  holder.state = state_;
}

Mesh Mesh::shared(const MeshOptions& options) {
  auto& holder = State::from_environment();
  std::unique_lock lock(holder.mutex);
  auto state = holder.state.lock();
  lock.unlock();
  return state && state->open ? Mesh(std::move(state)) : from_env(options);
}

Mesh Mesh::from_process_groups(
    const std::vector<std::string>& names, const std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>& groups,
    at::Device device) {
  if (names.size() != groups.size()) {
    throw ValueError(c10::str(
        "shardwise: a mesh got ", names.size(), " names for ", groups.size(), " process groups; give one name each."));
  }
  comm::ignore_broken_pipes();
  auto state = std::make_shared<State>();
  state->owns_groups = false;
  state->device = device;
  for (size_t i = 0; i < names.size(); ++i) {
    if (!groups[i]) {
      throw ValueError(
          c10::str("shardwise: the process group of axis '", names[i], "' is null: this rank is not a member of it."));
    }
    state->axes.push_back({names[i], groups[i]->getSize()});
    state->coordinates.push_back(groups[i]->getRank());
    state->rank = state->rank * groups[i]->getSize() + groups[i]->getRank();
  }
  comm::check_axes(state->axes);
  state->groups = groups;
  if (const auto timeout = comm::timeout_of(*groups.back())) {
    // The caller's time limit also applies to groups made later.
    state->options.timeout(*timeout).connect_timeout(*timeout);
    state->store = groups.back()->getStore();
  }
  return Mesh(state->shared(state));
}

Mesh Mesh::along(const std::vector<std::string>& axes) const {
  auto state = std::make_shared<State>();
  state->owns_groups = false;
  state->whole = state_;
  state->device = state_->device;
  state->options = state_->options;
  for (const auto& name : axes) {
    const auto position = state_->index(name);
    state->groups.push_back(group(name));
    state->axes.push_back(state_->axes[position]);
    state->coordinates.push_back(state_->coordinates[position]);
    state->rank = state->rank * state->axes.back().size + state->coordinates.back();
  }
  comm::check_axes(state->axes);
  state->store = state->groups.back()->getStore();
  return Mesh(state->shared(state));
}

const std::vector<Axis>& Mesh::axes() const {
  return state_->axes;
}

int64_t Mesh::ndim() const {
  return static_cast<int64_t>(state_->axes.size());
}

int64_t Mesh::size() const {
  return state_->size();
}

int64_t Mesh::size(const std::string& axis) const {
  return state_->axes[state_->index(axis)].size;
}

int64_t Mesh::rank() const {
  return state_->rank;
}

int64_t Mesh::coordinate(const std::string& axis) const {
  return state_->coordinates[state_->index(axis)];
}

at::Device Mesh::device() const {
  return state_->device;
}

const c10::intrusive_ptr<c10d::ProcessGroup>& Mesh::group(const std::string& axis) const {
  const auto index = state_->index(axis);
  if (!state_->is_open()) {
    throw Error(c10::str("shardwise: ", describe(), " was shut down and has no process groups any more."));
  }
  return state_->groups[index];
}

void Mesh::shutdown() {
  state_->close();
}

std::string Mesh::describe() const {
  return state_->describe();
}

} // namespace shardwise

namespace shardwise::comm {

// group() raises if the mesh is closed.
MeshGroups::Group MeshGroups::gather(const Mesh& mesh, const std::string& axis) {
  const auto& all = mesh.group(axis);
  return mesh.state_->store ? mesh.state_->second_group("gather", axis) : all;
}

MeshGroups::Group MeshGroups::sum(const Mesh& mesh, const std::string& axis) {
  const auto& all = mesh.group(axis);
  return mesh.state_->store ? mesh.state_->second_group("sum", axis) : all;
}

MeshGroups::Group MeshGroups::save(const Mesh& mesh, const std::string& axis) {
  mesh.group(axis);
  return mesh.state_->second_group("save", axis);
}

MeshGroups::Group MeshGroups::transfer(const Mesh& mesh, const std::string& axis) {
  mesh.group(axis);
  return mesh.state_->second_group("transfer", axis);
}

MeshGroups::Group MeshGroups::neighbours(const Mesh& mesh, const std::string& axis, int64_t count) {
  const auto& all = mesh.group(axis);
  const auto size = all->getSize();
  if (count < 1 || size % count != 0) {
    throw ValueError(c10::str(
        "shardwise: ", mesh.describe(), " cannot be divided into groups of ", count, " ranks along '", axis,
        "'; the number must be a divisor of ", size, "."));
  }
  if (count == size) return all;
  return mesh.state_->second_group("neighbours", mesh.state_->index(axis), static_cast<int>(count));
}

Ranks MeshGroups::line(const Mesh& mesh, const std::string& axis) {
  return mesh.state_->line(mesh.state_->index(axis));
}

AxisGroup axis_group_of(const Mesh& mesh, const std::string& axis) {
  return {mesh.group(axis), MeshGroups::line(mesh, axis)};
}

std::vector<AxisGroup> axis_groups_of(const Mesh& mesh) {
  std::vector<AxisGroup> lines;
  for (const auto& axis : mesh.axes()) lines.push_back(axis_group_of(mesh, axis.name));
  return lines;
}

} // namespace shardwise::comm
