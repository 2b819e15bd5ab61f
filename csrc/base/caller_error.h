#pragma once

#include <shardwise/error.h>
#include <shardwise/export.h>

namespace shardwise::base {

/// For a binding, once: torch gives its own callers of a language what it knows, and any other exception as one kind.
/// `rethrow` is called in a handler of an Error, and throws what torch knows in its place.
SHARDWISE_API void set_caller_error(void (*rethrow)());

/// In a handler of an Error: throws what the language's caller is to see, or returns where there is no binding.
SHARDWISE_API void rethrow_for_caller();

/// Does what torch called this library for, in a hook or an operation: an Error keeps its kind in the language of
/// whoever called torch.
template <typename Act>
decltype(auto) called_by_torch(const Act& act) {
  try {
    return act();
  } catch (const Error&) {
    rethrow_for_caller();
    throw;
  }
}

} // namespace shardwise::base
