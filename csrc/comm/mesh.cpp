#include <shardwise/mesh.h>

#include "comm/agreement.h"
#include "comm/direct_backend.h"
#include "comm/environment.h"
#include "comm/environment_claim.h"
#include "comm/language_lock.h"
#include "comm/process_group.h"
#include "comm/rendezvous.h"

#include <shardwise/error.h>

#include <ATen/Context.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <csignal>
#include <map>
#include <mutex>
#include <set>

namespace shardwise {
namespace {

void ignore_broken_pipes() {
  struct sigaction current {};
  if (sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

at::Device default_device(int local_rank) {
  if (!comm::has_nccl() || !at::globalContext().hasCUDA()) return at::kCPU;
  const auto gpus = static_cast<int>(at::getNumGPUs());
  if (local_rank >= gpus) {
    throw ValueError(c10::str(
        "shardwise: the environment variable LOCAL_RANK is ", local_rank, ", but this process sees ", gpus,
        " GPUs; start no more ranks on a machine than it has GPUs, or choose with MeshOptions().device()."));
  }
  return {at::kCUDA, static_cast<c10::DeviceIndex>(local_rank)};
}

/// Which rank of how many this is.
comm::Environment place(const MeshOptions& options) {
  if (!options.store()) {
    if (options.rank() != -1 || options.world_size() != -1) {
      throw ValueError(c10::str(
          "shardwise: MeshOptions has rank ", options.rank(), " and world_size ", options.world_size(),
          ", but no store; set a store that all ranks share, or set none of the three to use the environment."));
    }
    return comm::Environment::read();
  }
  comm::Environment env;
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

} // namespace

struct Mesh::State {
  std::vector<Axis> axes;
  std::vector<int64_t> coordinates;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
  int64_t rank = 0;
  at::Device device = at::kCPU;
  bool owns_groups = true;
  bool open = true;
  std::unique_ptr<comm::EnvironmentClaim> claim;
  /// What it takes to make more groups.
  c10::intrusive_ptr<c10d::Store> store;
  MeshOptions options;
  std::mutex mutex;
  /// By what they are for, and the axis.
  std::map<std::pair<std::string, size_t>, c10::intrusive_ptr<c10d::ProcessGroup>> groups_of_units;
  std::map<std::pair<size_t, int64_t>, c10::intrusive_ptr<c10d::ProcessGroup>> neighbours;

  /// The mesh that holds the claim.
  struct FromEnvironment {
    std::mutex mutex;
    std::weak_ptr<State> state;
  };
  static FromEnvironment& from_environment() {
    static FromEnvironment value;
    return value;
  }

  /// The state over the same groups as this one, if one is in use and says the same of them; this one otherwise.
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
    if (other && other->open && other->device == device &&
        std::equal(axes.begin(), axes.end(), other->axes.begin(), same_name)) {
      return other;
    }
    entry = self;
    return self;
  }

  ~State() {
    const comm::WithoutLanguageLock no_lock; // Threads that end with their groups may need it.
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
    const auto closing_too = std::exchange(groups_of_units, {});
    for (const auto& [place, group] : std::exchange(neighbours, {})) group->shutdown();
    store.reset();
    claim.reset();
    for (const auto& group : closing) {
      if (!owns_groups) break;
      comm::Agreement::forget(*group);
      group->shutdown();
    }
    for (const auto& [what, group] : closing_too) group->shutdown();
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
    return c10::str(text, "; rank ", rank, " on ", device, ways(), ")");
  }

  /// How the direct transport goes along the axes, where it is ours and open, be it for units alone.
  std::string ways() const {
    std::set<std::string> all;
    const auto add = [&](c10d::ProcessGroup& group) {
      if (!device.is_cpu() || group.getSize() == 1) return;
      const auto backend = group.getBackend(device.type());
      const auto* direct = dynamic_cast<const comm::direct::DirectBackend*>(backend.get());
      if (direct != nullptr) all.insert(direct->way());
    };
    if (owns_groups) {
      for (const auto& group : groups) add(*group);
    }
    for (const auto& [what, group] : groups_of_units) {
      if (std::find(groups.begin(), groups.end(), group) == groups.end()) add(*group);
    }
    std::string text;
    for (const auto& way : all) text += ", " + way;
    return text;
  }

  /// Row-major coordinates of this rank, and a process group along every axis.
  void connect() {
    coordinates.resize(axes.size());
    int64_t rest = rank;
    for (size_t i = axes.size(); i-- > 0;) {
      coordinates[i] = rest % axes[i].size;
      rest /= axes[i].size;
    }
    for (size_t i = 0; i < axes.size(); ++i) groups.push_back(make_group(i, ""));
    meet("");
  }

  c10::intrusive_ptr<c10d::ProcessGroup> make_group(size_t index, const std::string& purpose) {
    int64_t stride = 1;
    for (size_t i = index + 1; i < axes.size(); ++i) stride *= axes[i].size;
    // The first rank of the line names it: ranks of the same line agree on it, those of others do not.
    const auto line = c10::str(purpose, axes[index].name, "/", rank - coordinates[index] * stride);
    return comm::make_process_group(spec(
        line, c10::make_intrusive<c10d::PrefixStore>(line, store), static_cast<int>(coordinates[index]),
        static_cast<int>(axes[index].size)));
  }

  c10::intrusive_ptr<c10d::ProcessGroup> make_neighbours(size_t index, int count) {
    const auto& all = groups[index];
    auto place = all->getStore();
    if (!place) {
      throw Error(c10::str(
          "shardwise: the process group of axis '", axes[index].name, "' of ", describe(),
          " has no store, over which another group could be made. Let shardwise make the mesh, or give a process group "
          "with a store."));
    }
    const auto position = all->getRank();
    const auto name = c10::str("neighbours ", count, "/", position / count);
    place = comm::part_for_next_mesh(c10::make_intrusive<c10d::PrefixStore>(name, place), position % count);
    auto group = comm::make_process_group(
        spec(c10::str(axes[index].name, " ", name), place, static_cast<int>(position % count), count));
    comm::meet(*place, position % count, count, options.connect_timeout());
    return group;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group_of_units(
      const c10::intrusive_ptr<c10d::ProcessGroup>& all, const std::string& purpose, size_t index) {
    if (all->getSize() == 1 || !store) return all;
    const std::lock_guard lock(mutex);
    auto& made = groups_of_units[{purpose, index}];
    if (made) return made;
    if (!owns_groups) return made = make_neighbours(index, all->getSize());
    made = make_group(index, purpose + "/");
    meet(c10::str(purpose, "/", axes[index].name));
    return made;
  }

  comm::GroupSpec spec(std::string name, c10::intrusive_ptr<c10d::Store> place, int position, int count) const {
    return {
        .name = std::move(name),
        .store = std::move(place),
        .rank = position,
        .size = count,
        .device = device,
        .connect_timeout = options.connect_timeout(),
        .timeout = options.timeout(),
        .transport = options.transport() ? *options.transport() : comm::transport_of_environment(),
        .shared_memory = options.shared_memory() ? *options.shared_memory() : comm::shared_memory_of_environment()};
  }

  /// All ranks of the mesh come here.
  void meet(const std::string& purpose) {
    c10d::PrefixStore place(c10::str("meet ", purpose), store);
    comm::meet(place, static_cast<int>(rank), static_cast<int>(size()), options.connect_timeout());
  }
};

Mesh::Mesh(std::shared_ptr<State> state) : state_(std::move(state)) {}

Mesh Mesh::from_env(const MeshOptions& options) {
  return Mesh({{"world", place(options).world_size}}, options);
}

Mesh::Mesh(std::vector<Axis> axes, const MeshOptions& options) : state_(std::make_shared<State>()) {
  check_axes(axes);
  state_->axes = std::move(axes);
  const auto env = place(options);
  state_->rank = env.rank;
  state_->device = options.device() ? *options.device() : default_device(env.local_rank);
  if (state_->size() != env.world_size) {
    throw ValueError(c10::str(
        "shardwise: the sizes of ", state_->describe(), " multiply to ", state_->size(), ", but the world has ",
        env.world_size, " ranks (", options.store() ? "MeshOptions().world_size()" : "WORLD_SIZE", ")."));
  }
  ignore_broken_pipes();
  auto store = options.store();
  if (!store) {
    state_->claim = std::make_unique<comm::EnvironmentClaim>();
    store = env.connect(options.connect_timeout());
  }
  state_->store = comm::part_for_next_mesh(store, env.rank);
  state_->options = options;
  state_->connect();
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
  ignore_broken_pipes();
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
  check_axes(state->axes);
  state->groups = groups;
  if (const auto timeout = comm::timeout_of(*groups.back(), device)) {
    state->options.timeout(*timeout);
    state->store = groups.back()->getStore();
  }
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
  if (!state_->open) {
    throw Error(c10::str("shardwise: ", describe(), " was shut down; it has no process groups any more."));
  }
  return state_->groups[index];
}

c10::intrusive_ptr<c10d::ProcessGroup> Mesh::gather_group(const std::string& axis) const {
  return state_->group_of_units(group(axis), "gather", state_->index(axis));
}

c10::intrusive_ptr<c10d::ProcessGroup> Mesh::sum_group(const std::string& axis) const {
  return state_->group_of_units(group(axis), "sum", state_->index(axis));
}

c10::intrusive_ptr<c10d::ProcessGroup> Mesh::neighbours(const std::string& axis, int64_t count) const {
  const auto& all = group(axis);
  const auto index = state_->index(axis);
  const auto size = all->getSize();
  if (count < 1 || size % count != 0) {
    throw ValueError(c10::str(
        "shardwise: ", describe(), " cannot be divided into groups of ", count, " ranks along '", axis,
        "'; the number must be a divisor of ", size, "."));
  }
  if (count == size) return all;
  const std::lock_guard lock(state_->mutex);
  auto& made = state_->neighbours[{index, count}];
  if (!made) made = state_->make_neighbours(index, static_cast<int>(count));
  return made;
}

void Mesh::shutdown() {
  state_->close();
}

std::string Mesh::describe() const {
  return state_->describe();
}

} // namespace shardwise
