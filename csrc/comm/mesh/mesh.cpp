#include "base/caller.h"
#include "comm/agree/agreement.h"
#include "comm/mesh/axis_group.h"
#include "comm/mesh/process_group.h"
#include "comm/rendezvous/call_with_timeout.h"
#include "comm/rendezvous/environment.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/rendezvous/second_group.h"
#include "transport/transport.h"

#include <shardwise/error.h>
#include <shardwise/mesh.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <csignal>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
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

/// What copies of a mesh share: its axes, this rank's place on them, and the process groups.
struct Mesh::State {
  std::vector<Axis> axes;
  std::vector<int64_t> coordinates;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
  int64_t rank = 0;
  at::Device device = at::kCPU;
  bool owns_groups = true;
  bool open = true;
  /// The mesh whose process groups these are, if this one is made of some of its axes.
  std::shared_ptr<State> whole;
  std::shared_ptr<const void> claim;
  /// Needed to make more groups.
  c10::intrusive_ptr<c10d::Store> store;
  MeshOptions options;
  std::mutex mutex;
  /// By purpose, axis and number of ranks. Groups of a whole axis are for the units' own use.
  std::map<std::tuple<std::string, size_t, int>, c10::intrusive_ptr<c10d::ProcessGroup>> neighbours;

  /// The mesh that holds the claim.
  struct FromEnvironment {
    std::mutex mutex;
    std::weak_ptr<State> state;
  };
  static FromEnvironment& from_environment() {
    static FromEnvironment value;
    return value;
  }

  /// The state that another mesh already has for the same groups, if it is open and has the same device and axis names;
  /// otherwise this one.
  std::shared_ptr<State> shared(std::shared_ptr<State> self) {
    static std::mutex mutex;
    static std::map<std::vector<const c10d::ProcessGroup*>, std::weak_ptr<State>> all;
    std::vector<const c10d::ProcessGroup*> key;
    for (const auto& group : groups) key.push_back(group.get());
    const std::lock_guard lock(mutex);
    std::erase_if(all, [](const auto& entry) { return entry.second.expired(); });
    auto& entry = all[key];
    const auto same_name = [](const Axis& a, const Axis& b) { return a.name == b.name; };
    auto other = entry.lock();
    if (other && other->is_open() && other->whole == whole && other->device == device &&
        std::equal(axes.begin(), axes.end(), other->axes.begin(), same_name)) {
      return other;
    }
    entry = self;
    return self;
  }

  ~State() {
    const base::WithoutCallerLock no_lock; // Threads that end with the groups may need the lock.
    try {
      close();
    } catch (const std::exception& error) {
      TORCH_WARN("shardwise: closing ", describe(), " failed: ", error.what());
    }
  }

  void close() {
    if (!open) return;
    open = false;
    const auto closing = std::exchange(groups, {});
    for (const auto& [place, group] : std::exchange(neighbours, {})) comm::end_process_group(*group);
    store.reset();
    claim.reset();
    for (const auto& group : closing) {
      if (!owns_groups) break;
      comm::Agreement::forget(*group);
      comm::end_process_group(*group);
    }
  }

  bool is_open() const {
    return open && (!whole || whole->is_open());
  }

  size_t index(const std::string& name) const {
    for (size_t i = 0; i < axes.size(); ++i) {
      if (axes[i].name == name) return i;
    }
    throw ValueError(c10::str("shardwise: there is no axis '", name, "' in ", describe(), "."));
  }

  int64_t size() const {
    int64_t product = 1;
    for (const auto& axis : axes) product *= axis.size;
    return product;
  }

  std::string describe() const {
    std::string text = "Mesh(";
    for (size_t i = 0; i < axes.size(); ++i) text += c10::str(i ? ", " : "", axes[i].name, "=", axes[i].size);
    const auto of_whole = whole ? c10::str(" (rank ", whole->rank, " of ", whole->size(), ")") : std::string();
    return c10::str(text, "; rank ", rank, of_whole, " on ", device, ways(), ")");
  }

  /// How the direct transport works along the axes ("shared memory", "TCP"), in groups that are ours and open.
  std::string ways() const {
    std::set<std::string> all;
    const auto add = [&](c10d::ProcessGroup& group) {
      if (group.getSize() == 1) return;
      const auto backend = group.getBackend(device.type());
      const auto way = transport::transport_name(*backend);
      if (!way.empty()) all.insert(way);
    };
    if (owns_groups) {
      for (const auto& group : groups) add(*group);
    }
    for (const auto& [what, group] : neighbours) add(*group);
    std::string text;
    for (const auto& way : all) text += ", " + way;
    return text;
  }

  /// Sets this rank's row-major coordinates, and makes a process group along every axis. `over` may be a store that was
  /// used before.
  void connect(const c10::intrusive_ptr<c10d::Store>& over) {
    coordinates.resize(axes.size());
    int64_t rest = rank;
    for (size_t i = axes.size(); i-- > 0;) {
      coordinates[i] = rest % axes[i].size;
      rest /= axes[i].size;
    }
    std::vector<int64_t> all(size());
    std::iota(all.begin(), all.end(), 0);
    auto whole = spec(describe(), over, static_cast<int>(rank), all);
    const auto joined = comm::call_with_timeout(whole.connect_timeout, nullptr, [whole] {
      return comm::rendezvous(whole, comm::Processes::identity(whole.rank));
    });
    store = whole.store = joined.store;
    whole.processes = comm::Processes(joined.texts);
    for (size_t i = 0; i < axes.size(); ++i) groups.push_back(make_group(i, joined.texts));
    comm::call_with_timeout(whole.connect_timeout, nullptr, [whole] { comm::store_barrier(whole); });
  }

  /// The ranks along an axis.
  comm::Ranks line(size_t index) const {
    int64_t stride = 1;
    for (size_t i = index + 1; i < axes.size(); ++i) stride *= axes[i].size;
    return {.first = rank - coordinates[index] * stride, .stride = stride};
  }

  std::vector<comm::AxisGroup> lines() const {
    std::vector<comm::AxisGroup> all;
    for (size_t i = 0; i < axes.size(); ++i) all.push_back({groups[i], line(i)});
    return all;
  }

  std::vector<int64_t> names_of(size_t index, int64_t first, int64_t count) const {
    std::vector<int64_t> names;
    for (int64_t i = first; i < first + count; ++i) names.push_back(line(index)[i]);
    return names;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> make_group(size_t index, const std::vector<std::string>& identities) {
    // Named after the first rank of the line, so that the ranks of one line agree and different lines differ.
    const auto name = c10::str(axes[index].name, "/", line(index).first);
    auto along = spec(
        name, c10::make_intrusive<c10d::PrefixStore>(name, store), static_cast<int>(coordinates[index]),
        names_of(index, 0, axes[index].size));
    std::vector<std::string> some;
    for (const auto number : along.names) some.push_back(identities[number]);
    along.processes = comm::Processes(some);
    return comm::make_process_group(along);
  }

  c10::intrusive_ptr<c10d::ProcessGroup> make_neighbours(const std::string& purpose, size_t index, int count) {
    const auto& all = groups[index];
    auto place = all->getStore();
    if (!place) {
      throw Error(c10::str(
          "shardwise: the process group of axis '", axes[index].name, "' of ", describe(),
          " has no store, and shardwise needs one to make further groups. Let shardwise make the mesh, or pass a "
          "process group with a store."));
    }
    const auto position = all->getRank();
    const auto name = c10::str(purpose, " ", count, "/", position / count);
    auto some = spec(
        c10::str(axes[index].name, " ", name), c10::make_intrusive<c10d::PrefixStore>(name, place), position % count,
        names_of(index, int64_t{position / count} * count, count));
    const auto agreement = comm::Agreement::known(lines());
    const auto what = c10::str("the set-up of the process group '", some.name, "'");
    if (agreement) some.look = [agreement, what] { agreement->check_peers_alive(what); };
    try {
      return comm::make_second_group(*all, line(index), std::move(some)).group;
    } catch (const PeerError& error) {
      if (agreement) agreement->fail(error.what());
      throw;
    }
  }

  /// The group for this purpose, made at the first call.
  c10::intrusive_ptr<c10d::ProcessGroup> second_group(const std::string& purpose, size_t index, int count) {
    const std::lock_guard lock(mutex);
    const std::tuple key(purpose, index, count);
    if (const auto found = neighbours.find(key); found != neighbours.end()) return found->second;
    // Nothing is stored if this raises.
    auto made = make_neighbours(purpose, index, count);
    return neighbours.emplace(key, std::move(made)).first->second;
  }

  /// That of all ranks along an axis.
  c10::intrusive_ptr<c10d::ProcessGroup> second_group(const std::string& purpose, const std::string& axis) {
    const auto& all = groups[index(axis)];
    return all->getSize() == 1 ? all : second_group(purpose, index(axis), all->getSize());
  }

  comm::GroupSpec spec(
      std::string name, c10::intrusive_ptr<c10d::Store> place, int position, std::vector<int64_t> names) const {
    const auto asked = options.transport() ? options.transport() : comm::transport_in_environment();
    return {
        .name = std::move(name),
        .store = std::move(place),
        .rank = position,
        .size = static_cast<int>(names.size()),
        .device = device,
        .connect_timeout = options.connect_timeout(),
        .timeout = options.timeout(),
        // Devices have back ends of their own unless the direct transport is asked for by name.
        .direct_for_device = !device.is_cpu() && asked == Transport::direct,
        .transport = asked.value_or(Transport::direct),
        .shared_memory = options.shared_memory() ? *options.shared_memory() : comm::shared_memory_of_environment(),
        .names = std::move(names)};
  }
};

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

Mesh Mesh::current(const MeshOptions& options) {
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
  if (!device.is_cpu() && !device.has_index()) {
    auto env = comm::Environment::read();
    env.world_size = static_cast<int>(state->size());
    state->device = env.device(device.type());
  }
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
