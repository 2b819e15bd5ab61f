#pragma once

#include "base/forked.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <sys/socket.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace shardwise::comm {

/// Finds the sockets of one Gloo. Gloo has no call for that, but its ranks exchange their listening addresses through
/// the store.
class GlooSockets {
 public:
  using Addresses = std::vector<sockaddr_storage>;

  /// Wraps the store for a Gloo that is about to be made, and notes the addresses that it writes and reads.
  c10::intrusive_ptr<c10d::Store> overhear(const c10::intrusive_ptr<c10d::Store>& store);

  /// Call this once all ranks are connected. From then on Gloo's listening sockets answer nobody, and a forked child
  /// closes its copies of the connections, so that peers notice at once when this process dies.
  void close_doors();

 private:
  class Overheard;
  struct Heard {
    std::mutex mutex;
    Addresses own;
    Addresses peers;
  };

  std::shared_ptr<Heard> heard_ = std::make_shared<Heard>();
  std::unique_ptr<base::InForkedChild> in_child_;
};

} // namespace shardwise::comm
