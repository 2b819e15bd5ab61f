#pragma once

#include "comm/rendezvous/processes.h"

#include <shardwise/detail/export.h>
#include <shardwise/mesh.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::comm {

/// What is needed to make a process group: its ranks, and how they find each other.
struct GroupSpec {
  std::string name;
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int size;
  at::Device device;
  std::chrono::milliseconds connect_timeout;
  std::chrono::milliseconds timeout;
  /// The back end for tensors of a device of the group beside which this one is made: this one gets one like it. If
  /// null, the usual one: for CUDA what torch's name "nccl" stands for.
  c10::intrusive_ptr<c10d::Backend> device_backend = nullptr;
  /// Or: whether the direct transport carries them.
  bool direct_for_device = false;
  /// For CPU tensors.
  Transport transport = Transport::gloo;
  /// Whether the direct transport may use shared memory if all ranks are on one host.
  bool shared_memory = true;
  /// The host's name; if empty, this host's.
  std::string host = {};
  /// The rank numbers that errors show; if empty, positions in the group.
  std::vector<int64_t> names = {};
  /// The ranks' processes, by position, as far as they are known.
  Processes processes = {};
  /// Called from time to time while waiting for other ranks. An error that it raises ends the wait.
  std::function<void()> look = {};

  int64_t name_of(int position) const {
    return names.empty() ? position : names[static_cast<size_t>(position)];
  }
  /// "rank 1 of 4", or "rank 6 (number 1 of the 4 of its process group)".
  std::string me() const;
  /// Calls look(), and raises PeerError if one of these processes has ended. `failed`: "could not set up".
  void look_at(const Processes& of_ranks, const char* failed) const;
};

SHARDWISE_API c10::intrusive_ptr<c10d::Backend> make_gloo(const GroupSpec& spec);
/// The direct transport, over a Gloo of its own.
SHARDWISE_API c10::intrusive_ptr<c10d::Backend> make_direct(const GroupSpec& spec);

/// Makes a process group: the given transport for CPU tensors and, on another device, what carries that device's.
/// Raises PeerError, at once if a rank's process is seen to end.
SHARDWISE_API c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const GroupSpec& spec);

/// Shuts it down. While an error is on its way through this thread, waits for no other rank, which may never come.
void end_process_group(c10d::ProcessGroup& group);

/// Makes only the direct transport's back end, over a store that may have been used before. Raises PeerError.
SHARDWISE_API c10::intrusive_ptr<c10d::Backend> make_transport(GroupSpec spec);

/// How long a process group waits for its ranks; unset if it does not say.
std::optional<std::chrono::milliseconds> timeout_of(c10d::ProcessGroup& group);

} // namespace shardwise::comm
