#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>

namespace shardwise::comm {

/// What happens to idle pieces of memory (numbered from 0) on a request for memory.
struct IdleChoice {
  /// The piece that serves the request.
  std::optional<std::size_t> serves;
  /// If none serves it, memory is allocated, and this piece is freed.
  std::optional<std::size_t> gives_way;
};

/// The smallest piece that is large enough serves; among equals the lowest in memory, so that every step finds the
/// pieces of the step before. If none is large enough, the largest is freed to make way for a larger one: so the pieces
/// kept tend to the number of buffers in use at a time, each as large as the largest request. A piece of some size does
/// not serve a request for less than a quarter of it, which might keep it for the rest of a pass. `rank` returns a
/// piece's size and a key that orders pieces of equal size, or nothing if the piece cannot serve.
template <typename Size, typename Rank>
IdleChoice choose_idle(std::size_t pieces, Size size, const Rank& rank) {
  IdleChoice choice;
  constexpr Size kAnySize = 1048576;
  const auto most = std::max(4 * size, kAnySize);
  for (std::size_t i = 0; i < pieces; ++i) {
    const auto piece = rank(i);
    if (!piece) continue;
    if (piece->first >= size && piece->first <= most && (!choice.serves || *piece < *rank(*choice.serves)))
      choice.serves = i;
    if (!choice.gives_way || piece->first > rank(*choice.gives_way)->first) choice.gives_way = i;
  }
  if (choice.serves || (choice.gives_way && rank(*choice.gives_way)->first >= size)) choice.gives_way.reset();
  return choice;
}

} // namespace shardwise::comm
