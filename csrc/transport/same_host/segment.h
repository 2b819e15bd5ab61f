#pragma once

#include "base/descriptor.h"
#include "base/forked.h"

#include <shardwise/detail/export.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace shardwise::transport::same_host {

struct SHARDWISE_API Unmap {
  size_t bytes = 0;
  void operator()(std::byte* memory) const;
};
using Mapped = std::unique_ptr<std::byte, Unmap>;

/// Memory of this process that other processes of this host can read: a file without a name, so that nothing is left
/// after the last process that uses it, however that ends. Pages are allocated when first written, and begin as zeros.
/// The first kMark bytes are reserved. A forked child can neither read nor write it.
class SHARDWISE_API Segment {
 public:
  static constexpr size_t kMark = 64;

  /// What other processes need to open it.
  struct Address {
    int64_t process = 0;
    int64_t file = -1;
    /// Also at the beginning of the memory; different for every segment.
    uint64_t mark = 0;
    uint64_t bytes = 0;
  };

  /// Nothing if the system refuses.
  static std::optional<Segment> make(size_t bytes);
  /// Memory of this process alone, of which a forked child has a copy.
  static std::optional<Segment> make_private(size_t bytes);

  std::byte* begin() const {
    return memory_.get();
  }
  size_t bytes() const {
    return address_.bytes;
  }
  const Address& address() const {
    return address_;
  }
  /// Whether this process made it, rather than a parent that this one was forked from.
  bool is_of_this_process() const {
    return forks_ == base::forks();
  }
  /// Whether others can read it.
  bool is_private() const {
    return address_.mark == 0;
  }
  /// From now on no other process can open it; those that have it open keep it.
  void close() {
    file_ = base::Descriptor();
  }

 private:
  Segment() = default;

  Address address_;
  int64_t forks_ = base::forks();
  base::Descriptor file_;
  Mapped memory_;
  std::unique_ptr<base::InForkedChild> in_child_;
};

/// A view, for reading only, of another process's segment, or of one of this process. It stays valid after that process
/// ends.
class SHARDWISE_API SegmentView {
 public:
  /// Nothing if this process may not read it.
  static std::optional<SegmentView> open(const Segment::Address& address);

  const std::byte* at(size_t offset) const {
    return memory_.get() + offset;
  }

 private:
  explicit SegmentView(Mapped memory) : memory_(std::move(memory)) {}

  Mapped memory_;
};

/// A process (perhaps this one) and its arena.
struct SHARDWISE_API PeerProcess {
  /// The process that has this arena: one object for each arena. Null if this process may not read it.
  static std::shared_ptr<PeerProcess> of(const Segment::Address& arena);
  /// Whether the process still exists, even if it is stopped.
  bool alive() const;

  base::Descriptor watched;
  SegmentView arena;
};

/// What a rank can read of another rank of its process group.
struct Peer {
  std::shared_ptr<PeerProcess> process;
  SegmentView board;
};

} // namespace shardwise::transport::same_host
