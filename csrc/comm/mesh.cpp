#include <shardwise/mesh.h>

#include "base/broken_pipes.h"
#include "base/caller_lock.h"
#include "comm/agreement.h"
#include "comm/axis_group.h"
#include "comm/environment.h"
#include "comm/environment_claim.h"
#include "comm/mesh_options.h"
#include "comm/patience.h"
#include "comm/process_group.h"
#include "comm/rendezvous.h"
#include "comm/second_group.h"
#include "transport/transport.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <tuple>

namespace shardwise {
struct Mesh::State {
  std::vector<Axis> axes;
  std::vector<int64_t> coordinates;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
  int64_t rank = 0;
  at::Device device = at::kCPU;
  bool owns_groups = true;
  bool open = true;
  std::unique_ptr<comm::EnvironmentClaim> claim;
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
    if (other && other->open && other->device == device &&
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

  /// How the direct transport works along the axes ("shared memory", "TCP"), in groups that are ours and open.
  std::string ways() const {
    std::set<std::string> all;
    const auto add = [&](c10d::ProcessGroup& group) {
      if (group.getSize() == 1) return;
      const auto backend = group.getBackend(device.type());
      const auto way = transport::way_of(*backend);
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
    const auto roll = comm::patiently(whole.connect_timeout, nullptr, [whole] {
      return comm::call_the_roll(whole, comm::Processes::card(whole.rank));
    });
    store = whole.store = roll.store;
    whole.processes = comm::Processes(roll.texts);
    for (size_t i = 0; i < axes.size(); ++i) groups.push_back(make_group(i, roll.texts));
    comm::patiently(whole.connect_timeout, nullptr, [whole] {
      comm::meet(whole);
      return true;
    });
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

  c10::intrusive_ptr<c10d::ProcessGroup> make_group(size_t index, const std::vector<std::string>& cards) {
    // Named after the first rank of the line, so that the ranks of one line agree and different lines differ.
    const auto name = c10::str(axes[index].name, "/", line(index).first);
    auto along = spec(
        name, c10::make_intrusive<c10d::PrefixStore>(name, store), static_cast<int>(coordinates[index]),
        names_of(index, 0, axes[index].size));
    std::vector<std::string> some;
    for (const auto number : along.names) some.push_back(cards[number]);
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
    if (!agreement) return comm::make_beside(*all, line(index), std::move(some)).group;
    const auto what = c10::str("the set-up of the process group '", some.name, "'");
    some.look = [agreement, what] { agreement->look_beside(what); };
    try {
      return comm::make_beside(*all, line(index), std::move(some)).group;
    } catch (const PeerError& error) {
      agreement->fail(error.what());
    }
  }

  /// The group for this purpose, made at the first call.
  c10::intrusive_ptr<c10d::ProcessGroup> beside(const std::string& purpose, size_t index, int count) {
    const std::lock_guard lock(mutex);
    const std::tuple key(purpose, index, count);
    if (const auto found = neighbours.find(key); found != neighbours.end()) return found->second;
    // Nothing is stored if this raises.
    auto made = make_neighbours(purpose, index, count);
    return neighbours.emplace(key, std::move(made)).first->second;
  }

  c10::intrusive_ptr<c10d::ProcessGroup> of_units(const std::string& purpose, const std::string& axis) {
    const auto& all = groups[index(axis)];
    return all->getSize() == 1 || !store ? all : beside(purpose, index(axis), all->getSize());
  }

  /// Devices have back ends of their own unless the direct transport is asked for by name.
  bool is_direct_for_devices() const {
    const auto asked = options.transport() ? options.transport() : comm::transport_in_environment();
    return !device.is_cpu() && asked == Transport::direct;
  }

  comm::GroupSpec spec(
      std::string name, c10::intrusive_ptr<c10d::Store> place, int position, std::vector<int64_t> names) const {
    return {
        .name = std::move(name),
        .store = std::move(place),
        .rank = position,
        .size = static_cast<int>(names.size()),
        .device = device,
        .connect_timeout = options.connect_timeout(),
        .timeout = options.timeout(),
        .direct_for_device = is_direct_for_devices(),
        .transport =
            options.transport() ? *options.transport() : comm::transport_in_environment().value_or(Transport::direct),
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
  state_->device = options.device() ? *options.device() : env.device();
  if (state_->size() != env.world_size) {
    throw ValueError(c10::str(
        "shardwise: the sizes of ", state_->describe(), " multiply to ", state_->size(), ", but the world has ",
        env.world_size, " ranks (", options.store() ? "MeshOptions().world_size()" : "WORLD_SIZE", ")."));
  }
  base::ignore_broken_pipes();
  auto store = options.store();
  if (!store) {
    state_->claim = std::make_unique<comm::EnvironmentClaim>();
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
  base::ignore_broken_pipes();
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
    throw Error(c10::str("shardwise: ", describe(), " was shut down and has no process groups any more."));
  }
  return state_->groups[index];
}

c10::intrusive_ptr<c10d::ProcessGroup> Mesh::gather_group(const std::string& axis) const {
  group(axis);
  return state_->of_units("gather", axis);
}

c10::intrusive_ptr<c10d::ProcessGroup> Mesh::sum_group(const std::string& axis) const {
  group(axis);
  return state_->of_units("sum", axis);
}

c10::intrusive_ptr<c10d::ProcessGroup> Mesh::save_group(const std::string& axis) const {
  const auto size = group(axis)->getSize();
  return size == 1 ? group(axis) : state_->beside("save", state_->index(axis), size);
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
  return state_->beside("neighbours", index, static_cast<int>(count));
}

void Mesh::shutdown() {
  state_->close();
}

std::string Mesh::describe() const {
  return state_->describe();
}

} // namespace shardwise
