#pragma once

#include "comm/processes.h"

#include <shardwise/export.h>
#include <shardwise/mesh.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::comm {

/// The name of the direct transport among back ends.
inline constexpr auto kDirectBackend = "shardwise";

/// What is needed to make a process group: its ranks, and how they find each other.
struct GroupSpec {
  std::string name;
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int size;
  at::Device device;
  std::chrono::milliseconds connect_timeout;
  std::chrono::milliseconds timeout;
  /// For tensors of a device: the name of the back end that a group beside this one has, or kDirectBackend. If empty,
  /// the usual one: for CUDA what torch's name "nccl" stands for.
  std::string device_backend = {};
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
};

SHARDWISE_API c10::intrusive_ptr<c10d::Backend> make_gloo(const GroupSpec& spec);
/// The direct transport, over a Gloo of its own.
SHARDWISE_API c10::intrusive_ptr<c10d::Backend> make_direct(const GroupSpec& spec);
/// Only if this build has NCCL.
c10::intrusive_ptr<c10d::Backend> make_nccl(const GroupSpec& spec);
bool has_nccl();

/// Makes a process group: the given transport for CPU tensors and, on another device, what carries that device's.
/// Raises PeerError, at once if a rank's process is seen to end.
SHARDWISE_API c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const GroupSpec& spec);

/// Makes only the direct transport's back end, over a store that may have been used before. Raises PeerError.
SHARDWISE_API c10::intrusive_ptr<c10d::Backend> make_transport(GroupSpec spec);

/// How long a process group waits for its ranks; unset if it does not say.
std::optional<std::chrono::milliseconds> timeout_of(c10d::ProcessGroup& group);

} // namespace shardwise::comm
