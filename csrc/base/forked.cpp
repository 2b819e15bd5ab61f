#include "base/forked.h"

#include <shardwise/error.h>

#include <c10/util/StringUtil.h>

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <unordered_set>
#include <utility>

namespace shardwise::base {
namespace {

std::atomic<int64_t> forks_so_far = 0;

/// Never destroyed: a process may fork while it ends.
struct Acts {
  std::mutex mutex;
  std::unordered_set<const std::function<void()>*> all;

  static Acts& get() {
    static auto* acts = [] {
      // A fork takes the lock, so that the child finds the list intact.
      pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); }, in_child);
      return new Acts;
    }();
    return *acts;
  }

  static void in_child() {
    ++forks_so_far;
    auto& acts = get();
    for (const auto* act : acts.all) (*act)();
    acts.mutex.unlock();
  }
};

} // namespace

int64_t forks() {
  // A caller needs later forks too, so counting starts here.
  static const auto& watched = Acts::get();
  static_cast<void>(watched);
  return forks_so_far.load(std::memory_order_relaxed);
}

void require_not_forked(int64_t forks_then, const char* what) {
  if (forks() == forks_then) return;
  throw Error(c10::str(
      "shardwise: this process was forked from a rank and cannot use ", what,
      ", which belongs to that rank. Start it with spawn or forkserver, or make a new mesh and new units in it after "
      "the fork."));
}

InForkedChild::InForkedChild(std::function<void()> act) : act_(std::move(act)) {
  auto& acts = Acts::get();
  const std::lock_guard lock(acts.mutex);
  acts.all.insert(&act_);
}

InForkedChild::~InForkedChild() {
  auto& acts = Acts::get();
  const std::lock_guard lock(acts.mutex);
  acts.all.erase(&act_);
}

} // namespace shardwise::base
