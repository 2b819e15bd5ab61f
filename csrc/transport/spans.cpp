#include "transport/spans.h"

#include <algorithm>

namespace shardwise::transport {

void Spans::fill(size_t offset, const std::byte* from, size_t bytes) const {
  for (const auto& [to, size] : spans_) {
    if (bytes == 0) return;
    if (offset >= size) {
      offset -= size;
      continue;
    }
    const auto here = std::min(bytes, size - offset);
    // A rank's own input may already be in place.
    if (to + offset != from) std::copy_n(from, here, to + offset);
    from += here;
    bytes -= here;
    offset = 0;
  }
}

} // namespace shardwise::transport
