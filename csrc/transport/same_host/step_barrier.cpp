#include "transport/same_host/step_barrier.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <ctime>

namespace shardwise::transport::same_host {
namespace {

/// How often a wait checks for what wakes nobody: a peer that was killed, a process group that was shut down here.
constexpr auto kPeerCheckInterval = std::chrono::milliseconds(50);

/// Sleeps until the word differs from `seen`, somebody wakes it, or the time is over.
void sleep_on(const std::atomic<uint32_t>& word, uint32_t seen, std::chrono::milliseconds time) {
  const timespec limit{.tv_sec = 0, .tv_nsec = std::chrono::nanoseconds(time).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

void wake_all_on(const std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

} // namespace

StepBarrier::StepBarrier(Progress& progress, const Segment& board, const std::vector<Peer>& peers)
    : progress_(progress),
      own_(*reinterpret_cast<RankState*>(board.begin() + ControlBlock::progress())),
      peers_(peers) {}

const RankState& StepBarrier::of(int peer) const {
  return *reinterpret_cast<const RankState*>(peers_[peer].board.at(ControlBlock::progress()));
}

bool StepBarrier::has_arrived(int peer) const {
  const auto theirs = of(peer).step.load(std::memory_order_acquire);
  return static_cast<int32_t>(theirs - steps_) >= 0;
}

void StepBarrier::take_and_wait() {
  own_.step.store(++steps_, std::memory_order_release);
  wake_all_on(own_.step);
  for (int peer = 0; peer < progress_.size(); ++peer) {
    while (!has_arrived(peer)) {
      check_peers(peer);
      const auto seen = of(peer).step.load(std::memory_order_acquire);
      if (static_cast<int32_t>(seen - steps_) < 0)
        sleep_on(of(peer).step, seen, std::min(kPeerCheckInterval, progress_.left()));
    }
  }
}

void StepBarrier::check_peers(int awaited) {
  progress_.check();
  for (int peer = 0; peer < progress_.size(); ++peer) require_running(peer);
  if (!peers_[awaited].process->alive()) {
    // The peer may have taken the step and then ended, so has_arrived() is asked again, and not before alive().
    std::atomic_thread_fence(std::memory_order_acquire);
    if (!has_arrived(awaited)) progress_.fail_dead(awaited);
  }
  if (progress_.late() && !has_arrived(awaited)) progress_.fail(awaited, /*to_peer=*/false, "it did not come");
}

void StepBarrier::require_running(int peer) {
  const auto ended_at = of(peer).ended_at.load(std::memory_order_acquire);
  if (ended_at == 0 || ended_at > progress_.number()) return;
  const std::string its_failure = of(peer).reason.data();
  if (its_failure.empty()) progress_.fail_because(peer, "closed the connection: its process group was shut down.");
  progress_.fail_with(peer, its_failure);
}

void StepBarrier::require_all_running() {
  std::atomic_thread_fence(std::memory_order_acquire);
  for (int peer = 0; peer < progress_.size(); ++peer) require_running(peer);
}

// If this rank failed, the current collective is the first that it does not complete; if not, the next one is.
void StepBarrier::end() noexcept {
  if (own_.ended_at.load() != 0) return;
  const auto& reason = progress_.failure();
  const auto length = std::min(reason.size(), own_.reason.size() - 1);
  std::copy_n(reason.begin(), length, own_.reason.begin());
  own_.ended_at.store(progress_.broken() ? progress_.number() : progress_.number() + 1, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  wake_all_on(own_.step);
}

} // namespace shardwise::transport::same_host
