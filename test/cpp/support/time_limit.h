#pragma once

#include <chrono>
#include <string>

namespace shardwise::test {

/// SHARDWISE_TEST_TIME_LIMIT seconds, else 120 s.
std::chrono::milliseconds default_time_limit();

/// Starts the thread that watches the time; called once, by main(), in the thread that runs the tests.
/// From then on SIGUSR1 ends the process as the end of the time does: the process that watches this one sends it.
void start_time_watch();

/// While it lives, the running test has this long, from its making. When the time is up, the process names the test,
/// prints the last step of every watched thread and the stacks of all threads, and ends with exit code 124. The
/// innermost one counts.
class TimeLimit {
 public:
  explicit TimeLimit(std::chrono::milliseconds limit = default_time_limit());
  ~TimeLimit();
  TimeLimit(const TimeLimit&) = delete;
  TimeLimit& operator=(const TimeLimit&) = delete;

  /// No limit, however long it takes: for a process that another one watches.
  static constexpr auto kUnlimited = std::chrono::milliseconds::max();

 private:
  std::chrono::milliseconds outer_limit_;
  std::chrono::steady_clock::time_point outer_deadline_;
};

/// While it lives, the thread that made it is shown under this name.
class WatchedThread {
 public:
  explicit WatchedThread(std::string name);
  ~WatchedThread();
  WatchedThread(const WatchedThread&) = delete;
  WatchedThread& operator=(const WatchedThread&) = delete;

  /// What the calling thread does now.
  static void step(const std::string& text);
};

} // namespace shardwise::test
