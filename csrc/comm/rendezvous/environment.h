#pragma once

#include <shardwise/detail/export.h>
#include <shardwise/mesh.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

namespace shardwise::comm {

/// What environment variables say about this process and its peers. Raises a ValueError that names the variable at
/// fault.
struct SHARDWISE_API Environment {
  int rank = 0;
  int world_size = 1;
  /// Among the ranks of this host, if the launcher says.
  std::optional<int> local_rank;
  /// Empty in a world of one that no launcher started.
  std::string master_address;
  int master_port = 0;
  /// torchrun's agent serves the store, so no rank may.
  bool agent_store = false;

  static Environment read();

  /// The device of this kind for this rank, among those that are visible to its process. Raises ValueError.
  at::Device device(c10::DeviceType kind) const;

  /// The store that all ranks share; waits for it no longer than `timeout`. Raises PeerError. Rank 0 serves it until
  /// its process ends: a rank may connect again while rank 0 is still running.
  c10::intrusive_ptr<c10d::Store> connect(std::chrono::milliseconds timeout) const;
};

/// The kind of device that ranks use: one that is visible to this process and that this build can use, else the CPU.
SHARDWISE_API c10::DeviceType usual_device();

/// The number of the device for a rank whose process has `count` visible devices: the only one, or else the one with
/// the rank's number on its host. `kind` names them in errors. Raises ValueError.
SHARDWISE_API int choose_device(const std::string& kind, int count, int world_size, std::optional<int> local_rank);

/// The transport that SHARDWISE_TRANSPORT names, if it does. Raises ValueError.
SHARDWISE_API std::optional<Transport> transport_in_environment();

/// What SHARDWISE_SHARED_MEMORY says, or the default. Raises ValueError.
SHARDWISE_API bool shared_memory_of_environment();

/// To be held by the one mesh that is made from the environment. Raises ValueError if there is another.
std::shared_ptr<const void> claim_environment();

} // namespace shardwise::comm
