#pragma once

#include <shardwise/export.h>

namespace shardwise::base {

/// A lock that the caller's language may have taken, such as Python's. A module that computes under it, for its calls
/// were bound without letting go of it, must not keep it while it waits for other ranks: they may be threads of this
/// process that need it.
struct CallerLock {
  /// Lets go of the lock if this thread has it; null if it has not.
  void* (*release)() = nullptr;
  /// Takes it again, with what release() gave.
  void (*take)(void* released) = nullptr;
};

/// For a binding, once, before the first collective.
SHARDWISE_API void set_caller_lock(CallerLock lock);

/// While it lives, this thread does not have the lock.
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
