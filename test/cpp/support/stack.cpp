#include "support/stack.h"

#include <c10/util/Type.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <sstream>
#include <thread>

namespace shardwise::test {
namespace {

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

} // namespace

void allow_stacks() {
  // The first call loads a library, which a signal handler must not do.
  backtrace(frames.data(), 1);
  struct sigaction action {};
  action.sa_handler = take_stack;
  action.sa_flags = SA_RESTART;
  sigaction(SIGUSR2, &action, nullptr);
}

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

} // namespace shardwise::test
