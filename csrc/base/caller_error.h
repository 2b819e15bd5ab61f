#pragma once

#include <shardwise/error.h>
#include <shardwise/export.h>

#include <c10/macros/Macros.h>

namespace shardwise::base {

/// A language binding sets this once. Torch passes on exceptions that it knows to callers in other languages; all
/// others become one general kind. `rethrow` is called inside a handler of an Error, and throws an exception that torch
/// knows in its place.
SHARDWISE_API void set_caller_error(void (*rethrow)());

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
