// The transport's interface for the other layers.
#pragma once

#include "transport/direct_placement.h"
#include "transport/issue_count.h"
#include "transport/onlooker.h"
#include "transport/shared_memory.h"

#include <shardwise/export.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <string>
#include <vector>

namespace shardwise::transport {

struct BackendOptions {
  /// Whether to use shared memory if all ranks are on one host and can read each other's.
  bool shared_memory = true;
  /// The name of this host; ranks with the same name are on one host.
  std::string host;
  std::chrono::milliseconds connect_timeout;
  std::chrono::milliseconds timeout;
  /// The rank numbers that errors show; if empty, positions in the group.
  std::vector<int64_t> names = {};
};

/// Makes a back end (transport/staged_backend.h). All ranks of `gloo` call this; nobody else may use `gloo`
/// from now on.
c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> gloo, BackendOptions options);

/// How one of our back ends carries out collectives: "shared memory" or "TCP". Empty for other back ends.
std::string way_of(const c10d::Backend& backend);

} // namespace shardwise::transport
