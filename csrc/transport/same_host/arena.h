#pragma once

#include "transport/same_host/segment.h"

#include <shardwise/detail/export.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

namespace shardwise::transport::same_host {

/// Memory of this process for the tensors of ours that come and go in each step. Pages that were used once stay for the
/// next one: a fresh page costs more than a copy of it. Reserved as large as the host's memory. Thread safe.
class SHARDWISE_API Arena {
 public:
  /// The one that other ranks read in place: it exists as long as somebody holds it. Made if there is none; a forked
  /// child does not inherit its parent's. Null if the system refuses.
  static std::shared_ptr<Arena> of_this_process();
  /// That one if there is one, else one for this process alone, which stays. Null if the system refuses.
  static std::shared_ptr<Arena> in_use();

  bool is_of_this_process() const {
    return segment_.is_of_this_process();
  }
  bool is_private() const {
    return segment_.is_private();
  }
  const Segment::Address& address() const {
    return segment_.address();
  }
  /// Whether all of these bytes lie in the arena.
  bool holds(const void* memory, size_t bytes) const;
  /// The distance from the beginning of the arena, in bytes.
  size_t offset(const void* memory) const {
    return static_cast<size_t>(static_cast<const std::byte*>(memory) - segment_.begin());
  }

  /// Memory that begins at a page, with any content; null if there is no room.
  std::byte* take(size_t bytes);
  void give(std::byte* memory, size_t bytes);
  /// Returns what is free in all arenas of this process to the system.
  static void trim();

 private:
  explicit Arena(Segment segment);
  void return_free();

  Segment segment_;
  std::mutex mutex_;
  /// Free ranges: offset and size.
  std::map<size_t, size_t> free_;
};

} // namespace shardwise::transport::same_host
