#pragma once

#include <shardwise/export.h>

namespace shardwise::base {

/// A lock that the caller's language may hold, such as Python's GIL. A module may run while its thread holds the lock,
/// if its bindings do not release it. It must not hold the lock while it waits for other ranks, nor while it starts a
/// collective: threads of this process, such as those of torch's process groups, may need it first.
struct CallerLock {
  /// Releases the lock if this thread holds it; returns null if it does not.
  void* (*release)() = nullptr;
  /// Takes the lock again, with what release() returned.
  void (*take)(void* released) = nullptr;
};

/// A language binding sets this once, before the first collective.
SHARDWISE_API void set_caller_lock(CallerLock lock);

/// This thread does not hold the lock while this object lives.
class WithoutCallerLock {
 public:
  WithoutCallerLock();
  ~WithoutCallerLock();
  WithoutCallerLock(const WithoutCallerLock&) = delete;
  WithoutCallerLock& operator=(const WithoutCallerLock&) = delete;

 private:
  void* released_ = nullptr;
};

} // namespace shardwise::base
