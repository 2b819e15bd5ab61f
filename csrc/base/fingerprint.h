#pragma once

#include <cstdint>
#include <type_traits>

namespace shardwise::base {

/// A hash of a list that is the same on every machine, unlike std::hash: FNV-1a.
template <typename List>
uint64_t fingerprint(const List& list) {
  uint64_t hash = 14695981039346656037ULL;
  for (const auto item : list)
    hash = (hash ^ static_cast<std::make_unsigned_t<typename List::value_type>>(item)) * 1099511628211ULL;
  return hash;
}

} // namespace shardwise::base
