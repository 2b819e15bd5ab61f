#include "comm/agree/notes.h"

#include <mutex>
#include <utility>

namespace shardwise::comm {

struct Notes::State {
  explicit State(std::vector<Board> all) : boards(std::move(all)) {}

  const std::vector<Board> boards;
  std::mutex mutex;
  /// This rank's note, and whether it is not in the stores yet.
  Bytes mine;
  bool is_new = false;
  Bytes answered;
  std::vector<Found> found;

  // Writes its own note before reading the others', so that of two ranks that do this at least one sees the other's. An
  // error ends it: the waiting rank has a time limit of its own.
  void ask() {
    std::unique_lock lock(mutex);
    if (!std::exchange(is_new, false)) return;
    const auto note = mine;
    lock.unlock();
    std::vector<Found> answers;
    for (const auto& board : boards) board.store->set(board.mine, note);
    for (size_t i = 0; i < boards.size(); ++i) {
      for (const auto& key : boards[i].others) {
        if (boards[i].store->check({key})) answers.push_back({.board = i, .note = boards[i].store->get(key)});
      }
    }
    lock.lock();
    answered = note;
    found = std::move(answers);
  }
};

Notes::Notes(std::vector<Board> boards) : state_(std::make_shared<State>(std::move(boards))) {}

Notes::~Notes() {
  const std::lock_guard lock(state_->mutex);
  state_->is_new = false;
}

void Notes::leave(Bytes mine) {
  const std::lock_guard lock(state_->mutex);
  state_->mine = std::move(mine);
  state_->is_new = true;
  asked_ = background_.add([state = state_] { state->ask(); });
}

std::vector<Notes::Found> Notes::answers_to(const Bytes& mine) const {
  const std::lock_guard lock(state_->mutex);
  return state_->answered == mine ? state_->found : std::vector<Found>();
}

void Notes::flush(std::chrono::milliseconds limit) const {
  if (asked_.valid()) asked_.wait_for(limit);
}

} // namespace shardwise::comm
