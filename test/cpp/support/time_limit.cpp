#include "support/time_limit.h"

#include <c10/util/signal_handler.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <list>
#include <mutex>
#include <thread>

namespace shardwise::test {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kOverTime = 124;
constexpr auto kTick = std::chrono::milliseconds(50);

struct Watched {
  std::string name;
  pid_t thread;
  std::string step = "none";
};

/// Never destroyed: the watching thread outlives main().
struct Watch {
  std::mutex mutex;
  std::list<Watched> threads;
  std::chrono::milliseconds limit = TimeLimit::kUnlimited;
  Clock::time_point deadline = Clock::time_point::max();
  /// Set by SIGUSR1.
  std::atomic<bool> end_wanted = false;
};

Watch& watch() {
  static auto* const instance = new Watch;
  return *instance;
}

thread_local Watched* this_thread = nullptr;

std::string running_test() {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  return info == nullptr ? "no test" : std::string(info->test_suite_name()) + "." + info->name();
}

[[noreturn]] void end_with_stacks(const Watch& state) {
  for (const auto& watched : state.threads) {
    std::cerr << "--- " << watched.name << ": process " << getpid() << ", thread " << watched.thread
              << "; last step: " << watched.step << std::endl;
  }
  // Torch's handler prints the stack of every thread, and then calls the one that was there before.
  std::signal(SIGABRT, [](int) { _exit(kOverTime); });
  c10::FatalSignalHandler::getInstance().setPrintStackTracesOnFatalSignal(true);
  std::abort();
}

[[noreturn]] void watch_time() {
  auto& state = watch();
  while (true) {
    std::this_thread::sleep_for(kTick);
    const std::lock_guard lock(state.mutex);
    if (Clock::now() >= state.deadline) {
      std::cerr << "\n=== TIME LIMIT: " << running_test() << " has not finished within " << state.limit.count() << " ms"
                << std::endl;
      end_with_stacks(state);
    }
    if (state.end_wanted) end_with_stacks(state);
  }
}

void set_deadline(std::chrono::milliseconds limit, Clock::time_point deadline) {
  auto& state = watch();
  const std::lock_guard lock(state.mutex);
  state.limit = limit;
  state.deadline = deadline;
}

} // namespace

std::chrono::milliseconds default_time_limit() {
  const char* text = std::getenv("SHARDWISE_TEST_TIME_LIMIT");
  const double seconds = text == nullptr ? 120 : std::atof(text);
  if (seconds <= 0) {
    std::cerr << "SHARDWISE_TEST_TIME_LIMIT is '" << text << "'; it must be a number of seconds above 0.\n";
    std::exit(2);
  }
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

void start_time_watch() {
  watch();
  std::signal(SIGUSR1, [](int) { watch().end_wanted = true; });
  std::thread(watch_time).detach();
}

TimeLimit::TimeLimit(std::chrono::milliseconds limit) {
  {
    const std::lock_guard lock(watch().mutex);
    outer_limit_ = watch().limit;
    outer_deadline_ = watch().deadline;
  }
  set_deadline(limit, limit == kUnlimited ? Clock::time_point::max() : Clock::now() + limit);
}

TimeLimit::~TimeLimit() {
  set_deadline(outer_limit_, outer_deadline_);
}

WatchedThread::WatchedThread(std::string name) {
  const std::lock_guard lock(watch().mutex);
  watch().threads.push_back({.name = std::move(name), .thread = gettid()});
  this_thread = &watch().threads.back();
}

WatchedThread::~WatchedThread() {
  const std::lock_guard lock(watch().mutex);
  watch().threads.remove_if([](const Watched& watched) { return &watched == this_thread; });
  this_thread = nullptr;
}

void WatchedThread::step(const std::string& text) {
  const std::lock_guard lock(watch().mutex);
  if (this_thread != nullptr) this_thread->step = text;
}

} // namespace shardwise::test
