#pragma once

#include "comm/agree/background.h"
#include "comm/mesh/axis_group.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::comm {

/// Notes that waiting ranks leave for each other in shared stores, one note per rank. A store may be slow or not answer
/// at all, so a separate thread talks to it, and no function here waits except flush().
class Notes {
 public:
  using Bytes = std::vector<uint8_t>;
  /// A store, this rank's key there, and those of others.
  struct Board {
    c10::intrusive_ptr<c10d::Store> store;
    std::string mine;
    std::vector<std::string> others;
  };
  /// A note that another rank left, and the index of its board.
  struct Found {
    size_t board = 0;
    Bytes note;
  };

  explicit Notes(std::vector<Board> boards);
  ~Notes();

  /// Replaces this rank's note, and then asks for the notes of the others.
  void leave(Bytes mine);
  /// The notes that others had left by the time `mine` was in the stores; empty until the answer has come.
  std::vector<Found> answers_to(const Bytes& mine) const;
  /// Waits until the last note is in the stores, but no longer than `limit`.
  void flush(std::chrono::milliseconds limit) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
  Background background_;
  /// Ready when the last note is in the stores, or could not be put there.
  std::future<void> asked_;
};

/// The board on which the ranks of a process group leave notes of one kind, as seen by the rank at `position`.
inline Notes::Board note_board(
    c10::intrusive_ptr<c10d::Store> store, const std::string& kind, const Ranks& ranks, int position, int size) {
  const auto key = [&](int other) { return c10::str(kind, " of rank ", ranks[other]); };
  Notes::Board board{.store = std::move(store), .mine = key(position), .others = {}};
  for (int other = 0; other < size; ++other) {
    if (other != position) board.others.push_back(key(other));
  }
  return board;
}

} // namespace shardwise::comm
