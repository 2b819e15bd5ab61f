#pragma once

#include "base/forked.h"

#include <shardwise/export.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace shardwise::transport::same_host {

/// Memory of this process that others of this host can read: a file without a name in any file system, so that nothing
/// is left of it after the last process that has it, however that ends. Pages come when they are written to; they are
/// zeros at first. It begins with kMark bytes that are not the owner's to write. A child that this process forks can
/// neither read nor write it.
class SHARDWISE_API Segment {
 public:
  static constexpr size_t kMark = 64;

  /// What other processes need to read it.
  struct Address {
    int64_t process = 0;
    int64_t file = -1;
    /// Stands at the beginning too, and is no other segment's.
    uint64_t mark = 0;
    uint64_t bytes = 0;
  };

  /// Nothing where the system gives none.
  static std::optional<Segment> make(size_t bytes);
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
  /// Whether it is this process that made it, and not the one that this was forked from.
  bool is_of_this_process() const;
  /// No other process can open it from now on; those that have it keep it.
  void close();

 private:
  Segment() = default;

  Address address_;
  std::byte* memory_ = nullptr;
  std::unique_ptr<base::InForkedChild> in_child_;
};

/// Another's segment as this process reads it; it may be one of its own. Stays after its process ended.
class SHARDWISE_API SegmentView {
 public:
  /// Nothing where this process may not read it.
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

} // namespace shardwise::transport::same_host
