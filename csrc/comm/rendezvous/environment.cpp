#include "comm/rendezvous/environment.h"

#include "base/reason.h"
#include "comm/mesh/device_backend.h"
#include "comm/rendezvous/call_with_timeout.h"
#include "comm/rendezvous/launcher.h"

#include <shardwise/error.h>

#include <ATen/DeviceAccelerator.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>

namespace shardwise::comm {
namespace {

constexpr int kLargest = std::numeric_limits<int>::max();
/// torch's own, where nothing says more.
constexpr int kUsualPort = 29500;

std::optional<std::string> variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

/// Whether a variable has the first of two words. Raises ValueError for a third one.
std::optional<bool> is_first(const char* name, const char* first, const char* second) {
  const auto text = variable(name).value_or("");
  if (text.empty()) return std::nullopt;
  if (text == first || text == second) return text == first;
  throw ValueError(c10::str(
      "shardwise: the environment variable ", name, " is '", text, "'; it must be '", first, "' or '", second,
      "', or unset."));
}

std::string required(const char* name) {
  auto text = variable(name);
  if (!text) {
    throw ValueError(c10::str(
        "shardwise: the environment variable ", name,
        " is not set, but others of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are. Start the program with torchrun, "
        "mpirun or srun, set all four, or set none of them for a world of one."));
  }
  return *std::move(text);
}

/// What a launcher without torchrun's variables says; MASTER_ADDR and MASTER_PORT come first where they are set.
Environment environment_of(const Launched& told) {
  Environment env;
  env.rank = told.rank;
  env.world_size = told.world_size;
  env.local_rank = told.local_rank;
  const auto address = variable("MASTER_ADDR").value_or("");
  const auto port = variable("MASTER_PORT").value_or("");
  if (told.world_size == 1 && address.empty()) return env;
  env.master_address = address.empty() ? told.first_host : address;
  if (env.master_address.empty()) {
    throw ValueError(c10::str(
        "shardwise: ", told.launcher, " started this process as rank ", told.rank, " of ", told.world_size,
        " on several hosts, and nothing says which of them has rank 0. Set MASTER_ADDR to the name of that host, and "
        "MASTER_PORT to a free port there, on all ranks (Open MPI: mpirun -x MASTER_ADDR=...). Seen: ",
        told.seen, "."));
  }
  const auto usual = told.job.empty() ? kUsualPort : port_of(told.job);
  env.master_port = port.empty() ? usual : number_in("MASTER_PORT", port, 1, 65535);
  return env;
}

/// Keeps a store server until the process ends; one for each port.
void keep(int port, const c10::intrusive_ptr<c10d::Store>& store) {
  static std::mutex mutex;
  static auto* const servers = new std::map<int, c10::intrusive_ptr<c10d::Store>>;
  const std::lock_guard lock(mutex);
  servers->emplace(port, store);
}

int devices_seen() {
  return static_cast<uint8_t>(at::accelerator::deviceCount());
}

} // namespace

std::optional<Transport> transport_in_environment() {
  const auto is_direct = is_first("SHARDWISE_TRANSPORT", "direct", "gloo");
  return is_direct ? std::optional(*is_direct ? Transport::direct : Transport::gloo) : std::nullopt;
}

bool shared_memory_of_environment() {
  return is_first("SHARDWISE_SHARED_MEMORY", "on", "off").value_or(true);
}

Environment Environment::read() {
  Environment env;
  if (!variable("RANK") && !variable("WORLD_SIZE")) {
    if (const auto told = find_launcher(variable)) return environment_of(*told);
    if (!variable("MASTER_ADDR") && !variable("MASTER_PORT")) return env;
  }
  env.world_size = number_in("WORLD_SIZE", required("WORLD_SIZE"), 1, kLargest);
  env.rank = number_in("RANK", required("RANK"), 0, kLargest);
  if (env.rank >= env.world_size) {
    throw ValueError(c10::str(
        "shardwise: the environment variable RANK is ", env.rank, ", but WORLD_SIZE is ", env.world_size,
        "; RANK counts from 0 to WORLD_SIZE - 1."));
  }
  env.master_address = required("MASTER_ADDR");
  if (env.master_address.empty()) {
    throw ValueError(
        "shardwise: the environment variable MASTER_ADDR is empty; it must be the name or address of rank 0's "
        "machine.");
  }
  env.master_port = number_in("MASTER_PORT", required("MASTER_PORT"), 1, 65535);
  if (const auto text = variable("LOCAL_RANK")) env.local_rank = number_in("LOCAL_RANK", *text, 0, kLargest);
  env.agent_store = variable("TORCHELASTIC_USE_AGENT_STORE") == "True";
  return env;
}

int choose_device(const std::string& kind, int count, int world_size, std::optional<int> local_rank) {
  constexpr auto* kRemedy = ", or choose with MeshOptions().device().";
  // A launcher may show each rank a device of its own.
  if (count == 1) return 0;
  if (!local_rank) {
    if (world_size == 1) return 0;
    throw ValueError(c10::str(
        "shardwise: this process sees ", count, " ", kind,
        " devices, and nothing says which of them belongs to this "
        "rank. Set LOCAL_RANK to its number among the ranks of this host, as torchrun does, show each rank one device",
        kRemedy));
  }
  if (*local_rank < count) return *local_rank;
  throw ValueError(c10::str(
      "shardwise: the environment variable LOCAL_RANK is ", *local_rank, ", but this process sees ", count, " ", kind,
      " devices; start no more ranks on a machine than it has devices", kRemedy));
}

c10::DeviceType usual_device() {
  const auto kind = at::accelerator::getAccelerator();
  return kind && has_device_backend(*kind) && devices_seen() > 0 ? *kind : at::kCPU;
}

at::Device Environment::device(c10::DeviceType kind) const {
  if (kind == at::kCPU) return at::kCPU;
  const auto name = c10::DeviceTypeName(kind, /*lower_case=*/true);
  return {kind, static_cast<c10::DeviceIndex>(choose_device(name, devices_seen(), world_size, local_rank))};
}

c10::intrusive_ptr<c10d::Store> Environment::connect(std::chrono::milliseconds timeout) const {
  if (master_address.empty()) return c10::make_intrusive<c10d::HashStore>();
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(master_port);
  options.isServer = rank == 0 && !agent_store;
  options.waitWorkers = false;
  options.multiTenant = !agent_store;
  options.timeout = timeout;
  try {
    // TCPStore waits forever for a server that accepts the connection and never answers.
    auto store = call_with_timeout(timeout, nullptr, [address = master_address, options] {
      return c10::make_intrusive<c10d::TCPStore>(address, options);
    });
    if (options.isServer) keep(master_port, store);
    return c10::make_intrusive<c10d::PrefixStore>("shardwise", std::move(store));
  } catch (const std::exception& error) {
    const auto where = c10::str("MASTER_ADDR:MASTER_PORT = ", master_address, ":", master_port);
    const auto reason = base::reason(error);
    if (options.isServer && reason.find("EADDRINUSE") != std::string::npos) {
      throw PeerError(c10::str(
          "shardwise: rank ", rank, " of ", world_size, " could not serve the store at ", where,
          ", because the port is taken: another program on this machine listens there, perhaps another job or the rest "
          "of one. Give each job on a machine its own MASTER_PORT, the same on all its ranks: any free port from 1024 "
          "to 32767 (the system uses higher ones for outgoing connections). `torchrun --standalone` finds one by "
          "itself."));
    }
    throw PeerError(c10::str(
        "shardwise: rank ", rank, " of ", world_size, " could not ", options.isServer ? "serve" : "reach",
        " the store at ", where, " within ", timeout.count(),
        " ms. Check that rank 0 (or torchrun's agent) runs there and that the port is open to this machine, or allow "
        "more time with MeshOptions().connect_timeout(). Details: ",
        reason));
  }
}

std::shared_ptr<const void> claim_environment() {
  static std::atomic<bool> taken = false;
  if (taken.exchange(true)) {
    throw ValueError(
        "shardwise: this process already has a mesh made from the environment. Copy that Mesh (or use "
        "Mesh::current()), "
        "or shut it down before making another.");
  }
  return {&taken, [](const void*) { taken = false; }};
}

} // namespace shardwise::comm
