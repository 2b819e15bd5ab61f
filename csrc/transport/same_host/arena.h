#pragma once

#include "transport/same_host/segment.h"

#include <shardwise/export.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

namespace shardwise::transport::same_host {

/// Memory of this process for tensors that other ranks read in place. A process has at most one, reserved as large as
/// the host's memory, for as long as somebody holds it. Thread safe.
class SHARDWISE_API Arena {
 public:
  /// This process's arena, made if there is none; a forked child does not inherit its parent's. Null if the system
  /// refuses.
  static std::shared_ptr<Arena> of_this_process();
  /// This process's arena if there is one, else null.
  static std::shared_ptr<Arena> in_use();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  bool is_of_this_process() const {
    return segment_.is_of_this_process();
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

  /// Zeroed memory that begins at a page; null if there is no room.
  std::byte* take(size_t bytes);
  /// Returns the pages to the system: a rank that still reads them finds zeros.
  void give(std::byte* memory, size_t bytes);

 private:
  explicit Arena(Segment segment);

  Segment segment_;
  std::mutex mutex_;
  /// Free ranges: offset and size.
  std::map<size_t, size_t> free_;
};

} // namespace shardwise::transport::same_host
