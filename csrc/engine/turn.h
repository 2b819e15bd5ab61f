#pragma once

#include <shardwise/detail/export.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <string>

namespace shardwise::engine {

/// Says which thread may use a tree of units whose parameters come and go: one at a time. The thread takes the turn for
/// each operation or call, also for nested ones.
class SHARDWISE_API Turn {
 public:
  /// Raises Error if it is another thread's. `unit` is what this thread is about to use.
  void take(const std::string& unit) {
    const int own = this_thread();
    int holder = 0;
    if (thread_.load(std::memory_order_relaxed) != own &&
        !thread_.compare_exchange_strong(holder, own, std::memory_order_acquire)) {
      refuse(unit, holder, "uses");
    }
    ++depth_;
  }
  /// Does nothing if it is not this thread's.
  void give() {
    if (thread_.load(std::memory_order_relaxed) == this_thread() && --depth_ == 0) {
      thread_.store(0, std::memory_order_release);
    }
  }
  /// For a forked child: the thread that had the turn may not exist there.
  void drop() {
    thread_.store(0, std::memory_order_relaxed);
    depth_ = 0;
  }
  /// Raises Error if it is another thread's.
  void need() const {
    const int holder = thread_.load(std::memory_order_acquire);
    if (holder != 0 && holder != this_thread()) refuse("", holder, "uses");
  }
  /// Raises the Error: `unit` may be "", `other` is that thread's number, as a debugger shows it, and `does` what it
  /// does with the model.
  [[noreturn]] static void refuse(const std::string& unit, int other, const char* does);
  static int this_thread() {
    static thread_local int number = 0;
    if (number == 0) number = static_cast<int>(::syscall(SYS_gettid));
    return number;
  }

 private:
  /// 0: no thread's.
  std::atomic<int> thread_ = 0;
  int depth_ = 0;
};

} // namespace shardwise::engine
