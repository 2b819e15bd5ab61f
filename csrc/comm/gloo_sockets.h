#pragma once

#include "base/forked.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <sys/socket.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace shardwise::comm {

/// The sockets of one Gloo. It says nowhere which they are, but its ranks tell each other through the store where they
/// listen.
class GlooSockets {
 public:
  using Addresses = std::vector<sockaddr_storage>;

  /// The store for a Gloo that is about to be made; what it writes there and reads is heard.
  c10::intrusive_ptr<c10d::Store> overhear(const c10::intrusive_ptr<c10d::Store>& store);

  /// All ranks are connected: strangers get no answer from here on, and a child that this process forks keeps none of
  /// the connections, so that peers hear at once when this process dies.
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
