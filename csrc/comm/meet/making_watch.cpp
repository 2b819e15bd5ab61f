#include "comm/meet/making_watch.h"

#include "comm/agree/note_board.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace shardwise::comm {
namespace {

// The first byte of a note about a failure. A rank that has not failed leaves a 0, which also replaces what an earlier
// attempt left.
constexpr uint8_t kFailed = 1;

// Long pauses, because one store may serve many ranks; the first comes before anything is asked, so that nothing is if
// all goes well.
constexpr std::chrono::milliseconds kPause{500};
constexpr std::chrono::milliseconds kPausePerRank{20};

std::vector<Notes::Board> boards_of(const std::vector<AxisGroup>& lines, const std::string& purpose) {
  std::vector<Notes::Board> boards;
  for (const auto& [group, ranks] : lines) {
    const auto store = c10::make_intrusive<c10d::PrefixStore>(purpose, group->getStore());
    boards.push_back(note_board(store, "failure", ranks, group->getRank(), group->getSize()));
  }
  return boards;
}

} // namespace

MakingWatch::MakingWatch(const std::vector<AxisGroup>& lines, const std::string& purpose)
    : rank_(lines.front().ranks[lines.front().group->getRank()]),
      notes_(boards_of(lines, purpose)),
      pause_(kPause),
      next_(std::chrono::steady_clock::now() + pause_) {
  for (const auto& line : lines) pause_ += line.group->getSize() * kPausePerRank;
}

void MakingWatch::look() {
  const auto now = std::chrono::steady_clock::now();
  if (now >= next_) {
    notes_.leave(mine_);
    next_ = now + pause_;
  }
  for (const auto& [board, note] : notes_.answers_to(mine_)) {
    if (note.empty() || note.front() != kFailed) continue;
    throw PeerError(c10::str(
        "shardwise: rank ", rank_,
        ": the process groups of a mesh could not be made, because another rank failed first: ",
        std::string(note.begin() + 1, note.end())));
  }
}

void MakingWatch::tell(const std::string& failure) {
  constexpr std::chrono::milliseconds kTell{500};
  mine_ = {kFailed};
  mine_.insert(mine_.end(), failure.begin(), failure.end());
  notes_.leave(mine_);
  notes_.flush(kTell);
}

} // namespace shardwise::comm
