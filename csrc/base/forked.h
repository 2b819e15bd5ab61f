#pragma once

#include <shardwise/export.h>

#include <cstdint>
#include <functional>

namespace shardwise::base {

/// How many forks led from the process that loaded this library to this one: what was made under another number belongs
/// to a process that this one was forked from.
SHARDWISE_API int64_t forks();

/// Raises Error where this process was forked since: `what` was made under that number of forks.
SHARDWISE_API void require_not_forked(int64_t forks_then, const char* what);

/// As long as it lives, every child that this process forks calls `act` before it does anything else, on its one
/// thread. A program that the child turns into does not.
class SHARDWISE_API InForkedChild {
 public:
  explicit InForkedChild(std::function<void()> act);
  ~InForkedChild();
  InForkedChild(const InForkedChild&) = delete;
  InForkedChild& operator=(const InForkedChild&) = delete;

 private:
  std::function<void()> act_;
};

} // namespace shardwise::base
