#include "comm/agree/background.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace shardwise::comm {

struct Background::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::packaged_task<void()>> tasks;
  bool started = false;
  bool closed = false;

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return closed || !tasks.empty(); });
      if (tasks.empty()) return;
      auto task = std::move(tasks.front());
      tasks.pop_front();
      // Its end may need the lock of the caller's language, and who has that may wait in add().
      lock.unlock();
      task();
      task = {};
      lock.lock();
    }
  }
};

Background::Background() : state_(std::make_shared<State>()) {}

Background::~Background() {
  const std::lock_guard lock(state_->mutex);
  state_->closed = true;
  state_->changed.notify_all();
}

std::future<void> Background::add(std::function<void()> task) {
  const std::lock_guard lock(state_->mutex);
  if (!std::exchange(state_->started, true)) std::thread([state = state_] { state->run(); }).detach();
  state_->changed.notify_all();
  return state_->tasks.emplace_back(std::move(task)).get_future();
}

} // namespace shardwise::comm
