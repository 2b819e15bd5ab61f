#pragma once

#include <shardwise/export.h>
#include <shardwise/mesh.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace shardwise::comm {

/// What environment variables say about this process and its peers. Raises a ValueError that names the variable at
/// fault.
struct SHARDWISE_API Environment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  /// Empty in a world of one that no launcher started.
  std::string master_address;
  int master_port = 0;
  /// torchrun's agent serves the store, so no rank may.
  bool agent_store = false;

  static Environment read();

  /// The GPU whose index is the local rank, or the CPU if there are no GPUs. Raises ValueError.
  at::Device device() const;

  /// The store that all ranks share; waits for it no longer than `timeout`. Raises PeerError. Rank 0 serves it until
  /// its process ends: a rank may connect again while rank 0 is still running.
  c10::intrusive_ptr<c10d::Store> connect(std::chrono::milliseconds timeout) const;
};

/// The transport that SHARDWISE_TRANSPORT names, or the default. Raises ValueError.
SHARDWISE_API Transport transport_of_environment();

/// What SHARDWISE_SHARED_MEMORY says, or the default. Raises ValueError.
SHARDWISE_API bool shared_memory_of_environment();

} // namespace shardwise::comm
