#include "history.h"

namespace late {

History::Pieces::iterator History::at(size_t begin) {
  auto piece = std::prev(pieces_.upper_bound(begin));
  if (piece->first == begin) return piece;
  if (piece->second.end <= begin) return pieces_.end();
  auto second = piece->second;
  piece->second.end = begin;
  return pieces_.emplace(begin, std::move(second)).first;
}

std::optional<History::Conflict> History::access(
    size_t begin, size_t end, bool writes, const Operation& now, const Clock& clock) {
  std::optional<Conflict> conflict;
  if (begin >= end) return conflict;
  const auto first = at(begin);
  const auto last = at(end);
  for (auto piece = first; piece != last; ++piece) {
    const auto& [write, reads] = std::tie(piece->second.write, piece->second.reads);
    if (write && !clock.covers(write->moment)) conflict = {*write, true};
    if (!writes) continue;
    for (const auto& read : reads) {
      if (!clock.covers(read.moment)) conflict = {read, false};
    }
  }
  if (writes) {
    first->second = {.end = std::prev(last)->second.end, .write = now};
    pieces_.erase(std::next(first), last);
    return conflict;
  }
  for (auto piece = first; piece != last; ++piece) {
    auto& reads = piece->second.reads;
    std::erase_if(reads, [&](const auto& read) { return read.moment.stream == now.moment.stream; });
    reads.push_back(now);
  }
  return conflict;
}

void History::forget() {
  const auto size = pieces_.rbegin()->second.end;
  pieces_ = {{0, Piece{.end = size}}};
}

} // namespace late
