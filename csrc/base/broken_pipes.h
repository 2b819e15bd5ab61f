#pragma once

#include <csignal>

namespace shardwise::base {

/// Writing to a peer that is gone becomes an error, unless the program has set something for SIGPIPE itself.
inline void ignore_broken_pipes() {
  struct sigaction current {};
  if (sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

} // namespace shardwise::base
