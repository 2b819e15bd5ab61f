#pragma once

#include "clock.h"

#include <map>
#include <optional>
#include <string>

namespace late {

/// An operation that reads or writes memory. Its name lives for ever.
struct Operation {
  const char* name;
  Moment moment;
};

/// Who read and wrote each byte of a block since its last write: enough to tell whether another access is ordered
/// after all that it must not overtake. It knows nothing of when an operation really ran, so it finds a missing order
/// in every run.
class History {
 public:
  /// An earlier access that this one is not ordered after, though one of both writes.
  struct Conflict {
    Operation earlier;
    bool earlier_writes;
  };

  explicit History(size_t size) : pieces_{{0, Piece{.end = size}}} {}

  /// The bytes from `begin` up to `end` are read or written by `now`, which knows what `clock` covers.
  std::optional<Conflict> access(size_t begin, size_t end, bool writes, const Operation& now, const Clock& clock);
  /// The block begins anew: nothing that was done before matters.
  void forget();

 private:
  struct Piece {
    size_t end = 0;
    std::optional<Operation> write = {};
    /// The last one of each stream.
    std::vector<Operation> reads = {};
  };
  using Pieces = std::map<size_t, Piece>;

  /// The piece that begins there, after a split if need be; the end if nothing does.
  Pieces::iterator at(size_t begin);

  Pieces pieces_;
};

} // namespace late
