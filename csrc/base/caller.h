#pragma once

#include <shardwise/detail/export.h>
#include <shardwise/error.h>

#include <c10/macros/Macros.h>

namespace shardwise::base {

// What a language binding tells of the programs that call this library through it.

/// A lock that the caller's language may hold, such as Python's GIL. A module may run while its thread holds the lock,
/// if its bindings do not release it. It must not hold the lock while it waits for other ranks, nor while it starts a
/// collective: threads of this process, such as those of torch's process groups, may need it first.
struct CallerLock {
  /// Releases the lock if this thread holds it; returns null if it does not.
  void* (*release)() = nullptr;
  /// Takes the lock again, with what release() returned.
  void (*take)(void* released) = nullptr;
};

/// A binding calls this once, before the first collective. Torch passes on exceptions that it knows to callers in other
/// languages; all others become one general kind. `rethrow` is called inside a handler of an Error, and throws an
/// exception that torch knows in its place.
SHARDWISE_API void set_caller(CallerLock lock, void (*rethrow)());

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

/// Call this in a handler of an Error: throws it as an error of the caller's language, or returns if there is no
/// binding.
SHARDWISE_API void rethrow_for_caller();

/// Runs `act` in a hook or operation that torch calls, so that an Error keeps its type in the language of torch's
/// caller.
template <typename Act>
C10_ALWAYS_INLINE decltype(auto) called_by_torch(const Act& act) {
  try {
    return act();
  } catch (const Error&) {
    rethrow_for_caller();
    throw;
  }
}

} // namespace shardwise::base
