#include "comm/rendezvous/call_with_timeout.h"

#include "base/caller_lock.h"

#include <future>
#include <stdexcept>
#include <thread>

namespace shardwise::comm::detail {

void run_with_timeout(std::chrono::milliseconds limit, const std::function<void()>& look, std::function<void()> call) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kLook{50};
  // If the call reaches a time limit of its own, its error says more, so it gets a few seconds of grace.
  constexpr std::chrono::seconds kGrace{3};
  const base::WithoutCallerLock unlocked;
  const auto deadline = Clock::now() + limit + kGrace;
  std::packaged_task<void()> task(std::move(call));
  auto done = task.get_future();
  std::thread([task = std::move(task)]() mutable {
    task();
    // Destroys what the call holds, even if nobody waits any more.
    task = {};
  }).detach();
  while (done.wait_for(kLook) == std::future_status::timeout) {
    if (look) look();
    if (Clock::now() >= deadline) throw std::runtime_error("no answer came in that time");
  }
  done.get();
}

} // namespace shardwise::comm::detail
