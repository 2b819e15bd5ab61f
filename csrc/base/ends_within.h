#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <exception>

namespace shardwise::base {

/// Whether a work ends within `time`. It may end with an error, which the next wait raises. Not for works whose wait()
/// ignores timeouts.
inline bool ends_within(c10d::Work& work, std::chrono::milliseconds time) {
  try {
    work.wait(time);
    return true;
  } catch (const std::exception&) {
    return work.isCompleted();
  }
}

} // namespace shardwise::base
