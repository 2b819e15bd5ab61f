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

/// The ranks of one process group and how they meet.
struct GroupSpec {
  std::string name;
  c10::intrusive_ptr<c10d::Store> store;
  int rank;
  int size;
  at::Device device;
  std::chrono::milliseconds connect_timeout;
  std::chrono::milliseconds timeout;
  /// Of CPU tensors.
  Transport transport = Transport::gloo;
  /// Whether the direct transport goes through shared memory where all ranks are on one host and may.
  bool shared_memory = true;
  /// What names the host; empty: this one's.
  std::string host = {};
  /// What errors call the ranks; empty: by their positions.
  std::vector<int64_t> names = {};
  /// Those of the ranks, by position, as far as they are known.
  Processes processes = {};
  /// Asked now and then while others are waited for. What it raises ends the wait.
  std::function<void()> look = {};

  int64_t name_of(int position) const {
    return names.empty() ? position : names[static_cast<size_t>(position)];
  }
  /// "rank 1 of 4", or "rank 6 (number 1 of the 4 of its process group)".
  std::string me() const;
};

SHARDWISE_API c10::intrusive_ptr<c10d::Backend> make_gloo(const GroupSpec& spec);
/// The direct transport with a Gloo of its own.
SHARDWISE_API c10::intrusive_ptr<c10d::Backend> make_direct(const GroupSpec& spec);
/// Raises Error where this build has no NCCL.
c10::intrusive_ptr<c10d::Backend> make_nccl(const GroupSpec& spec);
bool has_nccl();

/// A process group: the given transport for CPU tensors, and on a CUDA device NCCL for its tensors. Raises PeerError,
/// at once where a rank's process is seen to end.
SHARDWISE_API c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(const GroupSpec& spec);

/// The back end of the direct transport alone, over a store that others may have used. Raises PeerError.
SHARDWISE_API c10::intrusive_ptr<c10d::Backend> make_transport(GroupSpec spec);

/// How long it waits for others; unset where it does not say.
std::optional<std::chrono::milliseconds> timeout_of(c10d::ProcessGroup& group);

} // namespace shardwise::comm
