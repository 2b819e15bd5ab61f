#pragma once

#include <shardwise/export.h>

namespace shardwise::comm {

/// A lock that the caller's language may have taken, such as Python's. A module that computes under it, for its calls
/// were bound without letting go of it, must not keep it while it waits for other ranks: they may be threads of this
/// process that need it.
struct LanguageLock {
  /// Lets go of the lock if this thread has it; null if it has not.
  void* (*release)() = nullptr;
  /// Takes it again, with what release() gave.
  void (*take)(void* released) = nullptr;
};

/// For a binding, once, before the first collective.
SHARDWISE_API void set_language_lock(LanguageLock lock);

/// While it lives, this thread does not have the lock.
class WithoutLanguageLock {
 public:
  WithoutLanguageLock();
  ~WithoutLanguageLock();
  WithoutLanguageLock(const WithoutLanguageLock&) = delete;
  WithoutLanguageLock& operator=(const WithoutLanguageLock&) = delete;

 private:
  void* released_ = nullptr;
};

} // namespace shardwise::comm
