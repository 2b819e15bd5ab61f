#include "comm/agree/notes.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

namespace shardwise::comm {

struct Notes::State {
  explicit State(std::vector<Board> all) : boards(std::move(all)) {}

  const std::vector<Board> boards;
  std::mutex mutex;
  std::condition_variable changed;
  bool started = false;
  bool closed = false;
  /// The number of the last note left, and of the last one put into the stores.
  uint64_t left = 0;
  uint64_t put = 0;
  Bytes mine;
  Bytes answered;
  std::vector<Found> found;

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return closed || put < left; });
      if (closed) return;
      const auto number = left;
      const auto note = mine;
      lock.unlock();
      auto answers = ask(note);
      lock.lock();
      put = number;
      if (answers) {
        answered = note;
        found = *std::move(answers);
      }
      changed.notify_all();
    }
  }

  // Writes its own note before reading the others', so that of two ranks that do this at least one sees the other's.
  std::optional<std::vector<Found>> ask(const Bytes& note) const {
    try {
      std::vector<Found> answers;
      for (const auto& board : boards) board.store->set(board.mine, note);
      for (size_t i = 0; i < boards.size(); ++i) {
        for (const auto& key : boards[i].others) {
          if (boards[i].store->check({key})) answers.push_back({.board = i, .note = boards[i].store->get(key)});
        }
      }
      return answers;
    } catch (const std::exception&) {
      return std::nullopt; // The waiting rank has a time limit of its own.
    }
  }
};

Notes::Notes(std::vector<Board> boards) : state_(std::make_shared<State>(std::move(boards))) {}

// Does not join the thread, which may be stuck in a store that does not answer.
Notes::~Notes() {
  const std::lock_guard lock(state_->mutex);
  state_->closed = true;
  state_->changed.notify_all();
}

void Notes::leave(Bytes mine) {
  const std::lock_guard lock(state_->mutex);
  if (!std::exchange(state_->started, true)) std::thread([state = state_] { state->run(); }).detach();
  state_->mine = std::move(mine);
  ++state_->left;
  state_->changed.notify_all();
}

std::vector<Notes::Found> Notes::answers_to(const Bytes& mine) const {
  const std::lock_guard lock(state_->mutex);
  return state_->answered == mine ? state_->found : std::vector<Found>();
}

void Notes::flush(std::chrono::milliseconds limit) const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait_for(lock, limit, [&] { return state_->put == state_->left; });
}

} // namespace shardwise::comm
