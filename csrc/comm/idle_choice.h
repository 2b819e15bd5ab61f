#pragma once

#include <cstddef>
#include <optional>

namespace shardwise::comm {

/// What becomes of idle pieces of memory, counted from 0, when some is asked for.
struct IdleChoice {
  /// It serves the request.
  std::optional<std::size_t> serves;
  /// Nothing serves it: memory is allocated, and this goes.
  std::optional<std::size_t> gives_way;
};

/// The smallest that is large enough serves, the first in memory of several: a step then finds what the one before had.
/// When none is, the largest gives way to a larger one: what is kept tends to the number of buffers in use at a time,
/// each as large as the largest request. `rank` gives the size of a piece and what orders those of one size, or nothing
/// where a piece cannot serve at all.
template <typename Size, typename Rank>
IdleChoice choose_idle(std::size_t pieces, Size size, const Rank& rank) {
  IdleChoice choice;
  for (std::size_t i = 0; i < pieces; ++i) {
    const auto piece = rank(i);
    if (!piece) continue;
    if (piece->first >= size && (!choice.serves || *piece < *rank(*choice.serves))) choice.serves = i;
    if (!choice.gives_way || piece->first > rank(*choice.gives_way)->first) choice.gives_way = i;
  }
  if (choice.serves) choice.gives_way.reset();
  return choice;
}

} // namespace shardwise::comm
