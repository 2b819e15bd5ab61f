#pragma once

#include <shardwise/export.h>
#include <shardwise/mesh.h>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace shardwise::comm {

/// What the environment says about this process and its peers. Raises ValueError that names the variable at fault.
struct SHARDWISE_API Environment {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  /// Empty in a world of one that nobody launched.
  std::string master_address;
  int master_port = 0;
  /// torchrun's agent serves the store: no rank may.
  bool agent_store = false;

  static Environment read();

  /// The GPU with the number of the local rank, where there are GPUs; else the CPU. Raises ValueError.
  at::Device device() const;

  /// The store that all ranks share; waits for it no longer than `timeout`. Raises PeerError.
  /// Rank 0 goes on serving it until its process ends: another rank may be back for more before rank 0 is done.
  c10::intrusive_ptr<c10d::Store> connect(std::chrono::milliseconds timeout) const;
};

/// What SHARDWISE_TRANSPORT says, or the default. Raises ValueError.
SHARDWISE_API Transport transport_of_environment();

/// What SHARDWISE_SHARED_MEMORY says, or the default. Raises ValueError.
SHARDWISE_API bool shared_memory_of_environment();

} // namespace shardwise::comm
