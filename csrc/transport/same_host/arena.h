#pragma once

#include "transport/same_host/segment.h"

#include <shardwise/export.h>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

namespace shardwise::transport::same_host {

/// Memory of this process for tensors that other ranks read in place. There is one in a process, with room for all
/// memory of the host, as long as somebody holds it. Thread safe.
class SHARDWISE_API Arena {
 public:
  /// The one of this process; a forked child has none of its parent's. Null where the system gives none.
  static std::shared_ptr<Arena> of_this_process();
  /// The same, where somebody holds it.
  static std::shared_ptr<Arena> in_use();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  bool is_of_this_process() const {
    return segment_.is_of_this_process();
  }
  const Segment::Address& address() const {
    return segment_.address();
  }
  /// Whether all of these bytes lie in it.
  bool holds(const void* memory, size_t bytes) const;
  /// From its beginning on.
  size_t offset(const void* memory) const {
    return static_cast<size_t>(static_cast<const std::byte*>(memory) - segment_.begin());
  }

  /// Zeros that begin with a page; null where there is no room.
  std::byte* take(size_t bytes);
  /// Their pages go back to the system: who reads them finds zeros.
  void give(std::byte* memory, size_t bytes);

 private:
  explicit Arena(Segment segment);

  Segment segment_;
  std::mutex mutex_;
  /// From where on, and how many bytes.
  std::map<size_t, size_t> free_;
};

} // namespace shardwise::transport::same_host
