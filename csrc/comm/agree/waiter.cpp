#include "comm/agree/waiter.h"

#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <thread>

namespace shardwise::comm {

class Waiter::Ticket {
 public:
  explicit Ticket(c10::intrusive_ptr<c10d::Work> for_work) : work(std::move(for_work)) {}
  c10::intrusive_ptr<c10d::Work> work;
  bool ended = false;
};

struct Waiter::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Ticket>> tickets;
  bool closed = false;

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return closed || !tickets.empty(); });
      if (tickets.empty()) return;
      auto ticket = std::move(tickets.front());
      tickets.pop_front();
      lock.unlock();
      // Let go before anybody hears of the end, since it holds the memory of tensors; and without the lock, since its
      // end may need that of the caller's language, and who has that may wait in add().
      auto work = std::move(ticket->work);
      // Swallows the work's error: a wait for the work itself raises it.
      std::packaged_task<void()>([&] { work->wait(); })();
      work.reset();
      lock.lock();
      ticket->ended = true;
      changed.notify_all();
    }
  }
};

Waiter::Waiter() : state_(std::make_shared<State>()) {
  std::thread([state = state_] { state->run(); }).detach();
}

Waiter::~Waiter() {
  const std::lock_guard lock(state_->mutex);
  state_->closed = true;
  state_->changed.notify_all();
}

std::shared_ptr<Waiter::Ticket> Waiter::add(c10::intrusive_ptr<c10d::Work> work) {
  auto ticket = std::make_shared<Ticket>(std::move(work));
  const std::lock_guard lock(state_->mutex);
  state_->tickets.push_back(ticket);
  state_->changed.notify_all();
  return ticket;
}

bool Waiter::ended(const Ticket& ticket, std::chrono::milliseconds within) {
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, within, [&] { return ticket.ended; });
}

} // namespace shardwise::comm
