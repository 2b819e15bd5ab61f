#pragma once

#include "clock.h"

#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace late {

/// A queue of tasks with a thread of its own, which is late: before some tasks it waits, as a seed says. The clock and
/// the order of push() belong to whoever holds the device's mutex.
class Stream {
 public:
  Stream(int device, c10::StreamId id);
  Stream(const Stream&) = delete;

  c10::Stream handle() const;
  /// Among all streams of the process.
  size_t number() const {
    return number_;
  }
  Clock clock;

  /// `cost` is what the task takes in virtual time; it does not begin before `issued`.
  void push(std::function<void()> task, double issued = 0, double cost = 0);
  /// For tasks, while they run: virtual time, which only moves forward.
  double time() const {
    return time_;
  }
  void advance_to(double time) {
    time_ = std::max(time_, time);
  }
  bool is_idle();

 private:
  struct Task {
    std::function<void()> run;
    double issued;
    double cost;
  };
  void work();

  const int device_;
  const c10::StreamId id_;
  const size_t number_;
  std::mutex mutex_;
  std::condition_variable pushed_;
  std::deque<Task> tasks_;
  bool busy_ = false;
  bool started_ = false;
  double time_ = 0;
};

} // namespace late
