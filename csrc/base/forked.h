#pragma once

#include <shardwise/detail/export.h>

#include <cstdint>
#include <functional>

namespace shardwise::base {

/// The number of forks between the process that loaded this library and this one. What was made at another count
/// belongs to a parent.
SHARDWISE_API int64_t forks();

/// Raises Error if this process was forked since `what` was made, which was at that count of forks.
SHARDWISE_API void require_not_forked(int64_t forks_then, const char* what);

/// While it lives, every child that this process forks calls `act` first, on its only thread. After an exec it is not
/// called.
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
