#pragma once

#include <cstddef>
#include <vector>

namespace shardwise::transport {

/// Where one rank's data goes on the receiver: pieces of memory, in order.
class Spans {
 public:
  struct Span {
    std::byte* to;
    size_t bytes;
  };

  Spans() = default;
  Spans(std::byte* to, size_t bytes) {
    add(to, bytes);
  }
  void add(std::byte* to, size_t bytes) {
    if (bytes > 0) spans_.push_back({to, bytes});
  }

  auto begin() const {
    return spans_.begin();
  }
  auto end() const {
    return spans_.end();
  }
  size_t size() const {
    return spans_.size();
  }
  /// Writes `bytes` bytes of the data, beginning at `offset` within it.
  void fill(size_t offset, const std::byte* from, size_t bytes) const;

 private:
  std::vector<Span> spans_;
};

} // namespace shardwise::transport
