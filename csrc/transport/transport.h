// What other layers know of the transport.
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
  /// Whether it goes through shared memory where all ranks are on one host and may.
  bool shared_memory = true;
  /// What names the host.
  std::string host;
  std::chrono::milliseconds connect_timeout;
  std::chrono::milliseconds timeout;
  /// What errors call the ranks; empty: by their positions.
  std::vector<int64_t> names = {};
};

/// A back end for CPU tensors (transport/backend.h), made by all ranks of `gloo`, which nobody else may use from here
/// on.
c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> gloo, BackendOptions options);

/// How a back end of ours carries out collectives: "shared memory" or "TCP"; empty for a back end of another kind.
std::string way_of(const c10d::Backend& backend);

} // namespace shardwise::transport
