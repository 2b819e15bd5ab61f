#pragma once

#include "base/forked.h"

#include <shardwise/export.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace shardwise::transport::same_host {

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
  ~Segment();
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;

  std::byte* begin() const {
    return memory_;
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
  void close();

 private:
  Segment() = default;

  Address address_;
  int64_t forks_ = base::forks();
  std::byte* memory_ = nullptr;
  std::unique_ptr<base::InForkedChild> in_child_;
};

/// A view, for reading only, of another process's segment, or of one of this process. It stays valid after that process
/// ends.
class SHARDWISE_API SegmentView {
 public:
  /// Nothing if this process may not read it.
  static std::optional<SegmentView> open(const Segment::Address& address);
  ~SegmentView();
  SegmentView(SegmentView&& other) noexcept;
  SegmentView& operator=(SegmentView&&) = delete;

  const std::byte* at(size_t offset) const {
    return memory_ + offset;
  }

 private:
  SegmentView() = default;

  const std::byte* memory_ = nullptr;
  size_t bytes_ = 0;
};

/// A process (perhaps this one) and its arena.
class SHARDWISE_API PeerProcess {
 public:
  /// The process that has this arena: one object for each arena. Null if this process may not read it.
  static std::shared_ptr<PeerProcess> of(const Segment::Address& arena);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  const SegmentView& arena() const {
    return arena_;
  }
  /// Whether the process still exists, even if it is stopped.
  bool alive() const;

 private:
  PeerProcess(int process, SegmentView arena);

  /// A pidfd, which becomes readable when the process ends.
  int process_;
  SegmentView arena_;
};

/// What a rank can read of another rank of its process group.
struct Peer {
  std::shared_ptr<PeerProcess> process;
  SegmentView board;
};

} // namespace shardwise::transport::same_host
