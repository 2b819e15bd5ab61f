#pragma once

#include "base/caller.h"

#include <chrono>
#include <functional>
#include <future>
#include <stdexcept>
#include <thread>
#include <utility>

namespace shardwise::comm {

/// Returns what `call` returns, and raises std::runtime_error if that takes longer than `limit` (and a few seconds'
/// grace). `call` runs on its own thread; meanwhile this one calls look(), which may raise, and does not hold the
/// caller's language lock. A thread that is left behind runs until the call returns, so `call` must own whatever it
/// uses.
template <typename Call>
auto call_with_timeout(std::chrono::milliseconds limit, const std::function<void()>& look, Call call) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kLook{50};
  // If the call reaches a time limit of its own, its error says more, so it gets a few seconds of grace.
  constexpr std::chrono::seconds kGrace{3};
  const base::WithoutCallerLock unlocked;
  const auto deadline = Clock::now() + limit + kGrace;
  std::packaged_task<decltype(call())()> task(std::move(call));
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
  return done.get();
}

} // namespace shardwise::comm
