#pragma once

#include "comm/agree/notes.h"
#include "comm/mesh/axis_group.h"

#include <c10/util/StringUtil.h>

#include <string>
#include <utility>

namespace shardwise::comm {

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
