#include "transport/exchange.h"

#include "transport/error.h"
#include "transport/sums.h"
#include "transport/tuning.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::transport {

void fill_spans(const Spans& spans, size_t offset, const std::byte* from, size_t bytes) {
  for (const auto& span : spans) {
    if (bytes == 0) return;
    if (offset >= span.size()) {
      offset -= span.size();
      continue;
    }
    const auto here = std::min(bytes, span.size() - offset);
    auto* to = span.data() + offset;
    // A rank's own input may already be in place.
    if (to != from) std::copy_n(from, here, to);
    from += here;
    bytes -= here;
    offset = 0;
  }
}

SumRange SumRange::of(size_t bytes, int rank, int world) {
  const auto dealt = kCacheLine * static_cast<size_t>(world);
  const auto largest = (bytes + dealt - 1) / dealt * kCacheLine;
  const auto begin = std::min(bytes, static_cast<size_t>(rank) * largest);
  return {.begin = begin, .bytes = std::min(largest, bytes - begin)};
}

void Exchange::compare(const Signature& mine, int peer, const Signature& theirs) const {
  if (theirs == mine) return;
  raise_backend_error(c10::str(
      "shardwise: ", progress_.me(), ": the ranks do not call the same collective: rank ", progress_.name_of(rank()),
      " calls ", mine.describe(), ", but rank ", progress_.name_of(peer), " calls ", theirs.describe(),
      ". All ranks of a process group must call the same collectives with the same sizes, in the same order. "
      "Nothing was sent."));
}

void Exchange::sum(const Call& call, std::byte* output, const Terms& terms, size_t bytes) {
  const auto elements = static_cast<int64_t>(bytes / c10::elementSize(call.signature.dtype));
  add_up(output, terms, elements, call.signature.dtype, call.is_mean());
}

std::vector<int> Exchange::peers() const {
  std::vector<int> peers;
  for (int step = 1; step < world(); ++step) peers.push_back((rank() + step) % world());
  return peers;
}

} // namespace shardwise::transport
