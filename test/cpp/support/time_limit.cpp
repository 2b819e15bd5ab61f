#include "support/time_limit.h"

#include <c10/util/Type.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <gtest/gtest.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <list>
#include <mutex>
#include <sstream>
#include <thread>

namespace shardwise::test {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kOverTime = 124;

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
  /// Posted when the deadline has changed, and by SIGUSR1.
  sem_t changed;
  std::atomic<bool> report_wanted = false;
};

Watch& watch() {
  static auto* const instance = new Watch;
  return *instance;
}

thread_local Watched* this_thread = nullptr;

void want_report(int) {
  watch().report_wanted = true;
  sem_post(&watch().changed);
}

std::string running_test() {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  return info == nullptr ? "no test" : std::string(info->test_suite_name()) + "." + info->name();
}

constexpr int kNotYet = -1;
std::array<void*, 64> frames;
std::atomic<int> num_frames = kNotYet;

/// Runs in the thread that is asked.
void take_stack(int) {
  num_frames = backtrace(frames.data(), static_cast<int>(frames.size()));
}

std::string name_of(void* address) {
  Dl_info info{};
  std::ostringstream text;
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) {
    text << address;
    return text.str();
  }
  if (info.dli_sname != nullptr) text << c10::demangle(info.dli_sname) << " in ";
  text << info.dli_fname << "+0x" << std::hex << static_cast<char*>(address) - static_cast<char*>(info.dli_fbase);
  return text.str();
}

/// Makes stack_of() possible: takes SIGUSR2 for it.
void allow_stacks() {
  // The first call loads a library, which a signal handler must not do.
  backtrace(frames.data(), 1);
  struct sigaction action {};
  action.sa_handler = take_stack;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR2, &action, nullptr);
}

/// The calls that a thread of this process is in, the innermost first, one a line. One caller at a time.
std::string stack_of(pid_t thread) {
  num_frames = kNotYet;
  if (syscall(SYS_tgkill, getpid(), thread, SIGUSR2) != 0) return "  (the thread has ended)\n";
  for (int tries = 0; num_frames == kNotYet; ++tries) {
    if (tries == 200) return "  (the thread does not answer)\n";
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::string text;
  // The first two are the handler and the signal's own frame.
  for (int i = 2; i < num_frames; ++i) text += "  " + name_of(frames[i]) + "\n";
  return text;
}

void report(Watch& state) {
  for (const auto& watched : state.threads) {
    std::cerr << "--- " << watched.name << ", process " << getpid() << "; last step: " << watched.step << std::endl;
    std::cerr << stack_of(watched.thread) << std::flush;
  }
}

void wait_for_change(Watch& state, Clock::time_point deadline) {
  if (deadline == Clock::time_point::max()) {
    sem_wait(&state.changed);
    return;
  }
  const auto since_start = std::chrono::nanoseconds(deadline.time_since_epoch()).count();
  const timespec until{since_start / 1'000'000'000, since_start % 1'000'000'000};
  sem_clockwait(&state.changed, CLOCK_MONOTONIC, &until);
}

[[noreturn]] void watch_time() {
  auto& state = watch();
  while (true) {
    Clock::time_point deadline;
    {
      const std::lock_guard lock(state.mutex);
      deadline = state.deadline;
    }
    wait_for_change(state, deadline);
    const std::lock_guard lock(state.mutex);
    if (state.report_wanted.exchange(false)) {
      report(state);
      if (state.limit == TimeLimit::kUnlimited) _exit(kOverTime);
    }
    if (Clock::now() < state.deadline) continue;
    std::cerr << "\n=== TIME LIMIT: " << running_test() << " has not finished within " << state.limit.count() << " ms"
              << std::endl;
    report(state);
    _exit(kOverTime);
  }
}

void set_deadline(std::chrono::milliseconds limit, Clock::time_point deadline) {
  auto& state = watch();
  {
    const std::lock_guard lock(state.mutex);
    state.limit = limit;
    state.deadline = deadline;
  }
  sem_post(&state.changed);
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
  sem_init(&watch().changed, 0, 0);
  allow_stacks();
  std::signal(SIGUSR1, want_report);
  std::thread(watch_time).detach();
}

TimeLimit::TimeLimit(std::chrono::milliseconds limit) {
  {
    const std::lock_guard lock(watch().mutex);
    outer_limit_ = watch().limit;
    outer_deadline_ = watch().deadline;
  }
  if (limit == std::chrono::milliseconds::zero()) limit = default_time_limit();
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
