#include "support/command.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <map>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace shardwise::test {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kPoll = std::chrono::milliseconds(5);
/// How long a process may take to print its stacks.
constexpr auto kLastWords = std::chrono::seconds(5);

void check(int error, const char* what) {
  if (error != 0) throw std::system_error(error, std::generic_category(), what);
}

class Process {
 public:
  explicit Process(const Command& command) : output_(memfd_create("output", MFD_CLOEXEC)) {
    if (output_ < 0) check(errno, "memfd_create");
    // Several processes write here; without this two could write to the same place.
    if (fcntl(output_, F_SETFL, O_APPEND) != 0) check(errno, "fcntl");
    std::map<std::string, std::string> variables;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string text = *entry;
      variables[text.substr(0, text.find('='))] = text.substr(text.find('=') + 1);
    }
    for (const auto& [name, value] : command.environment) {
      variables.erase(name);
      if (value) variables[name] = *value;
    }
    std::vector<std::string> settings;
    for (const auto& [name, value] : variables) settings.push_back(name + "=" + value);
    start(command.arguments, settings);
  }

  ~Process() {
    if (pid_ > 0) {
      signal(SIGKILL);
      while (!poll(std::chrono::milliseconds(0))) std::this_thread::sleep_for(kPoll);
    }
    close(output_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  bool running() const {
    return pid_ > 0;
  }

  void signal(int number) const {
    kill(pid_, number);
  }

  /// Asks those that it started in turn and that started no more, or itself: torchrun would die of it.
  void ask_for_stacks() const {
    for (const auto process : leaves(pid_)) kill(process, SIGUSR1);
  }

  void mark_timed_out() {
    ended_.timed_out = true;
  }

  /// Whether it has ended just now.
  bool poll(std::chrono::milliseconds after) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) != pid_) return false;
    pid_ = -1;
    if (WIFEXITED(status)) ended_.exit_code = WEXITSTATUS(status);
    if (WIFSIGNALED(status)) ended_.signal = WTERMSIG(status);
    ended_.after = after;
    return true;
  }

  Ended result() {
    ended_.output.resize(static_cast<size_t>(lseek(output_, 0, SEEK_END)));
    const auto size = pread(output_, ended_.output.data(), ended_.output.size(), 0);
    ended_.output.resize(static_cast<size_t>(std::max<ssize_t>(size, 0)));
    return ended_;
  }

 private:
  static std::vector<pid_t> leaves(pid_t process) {
    const auto number = std::to_string(process);
    std::ifstream file("/proc/" + number + "/task/" + number + "/children");
    std::vector<pid_t> result;
    for (pid_t child = 0; file >> child;) {
      const auto below = leaves(child);
      result.insert(result.end(), below.begin(), below.end());
    }
    return result.empty() ? std::vector{process} : result;
  }

  static std::vector<char*> pointers(const std::vector<std::string>& texts) {
    std::vector<char*> result;
    for (const auto& text : texts) result.push_back(const_cast<char*>(text.c_str()));
    result.push_back(nullptr);
    return result;
  }

  void start(const std::vector<std::string>& arguments, const std::vector<std::string>& settings) {
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, output_, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&files, output_, STDERR_FILENO);
    // A mesh in this process may have ignored SIGPIPE, which a new program would inherit.
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t defaults;
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGPIPE);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
    const int error = posix_spawnp(
        &pid_, arguments.front().c_str(), &files, &attributes, pointers(arguments).data(), pointers(settings).data());
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    if (error != 0) {
      pid_ = -1;
      close(output_);
      check(error, arguments.front().c_str());
    }
  }

  int output_;
  pid_t pid_ = -1;
  Ended ended_;
};

} // namespace

std::string Ended::how() const {
  if (timed_out) return "ended at the time limit";
  return signal != 0 ? "signal " + std::to_string(signal) : "exit code " + std::to_string(exit_code);
}

std::vector<Ended> run_commands(const std::vector<Command>& commands, std::chrono::milliseconds time_limit) {
  const auto start = Clock::now();
  std::vector<std::unique_ptr<Process>> processes;
  for (const auto& command : commands) processes.push_back(std::make_unique<Process>(command));

  // Whether all have ended by then.
  const auto wait_until = [&](Clock::time_point deadline) {
    while (true) {
      bool running = false;
      for (auto& process : processes) {
        if (!process->running()) continue;
        const auto after = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
        running = !process->poll(after) || running;
      }
      if (!running) return true;
      if (Clock::now() >= deadline) return false;
      std::this_thread::sleep_for(kPoll);
    }
  };
  const auto for_running = [&](auto&& call) {
    for (auto& process : processes) {
      if (process->running()) call(*process);
    }
  };
  if (!wait_until(start + time_limit)) {
    for_running([](Process& process) {
      process.mark_timed_out();
      process.ask_for_stacks();
    });
    wait_until(Clock::now() + kLastWords);
    for_running([](const Process& process) { process.signal(SIGKILL); });
    wait_until(Clock::time_point::max());
  }
  std::vector<Ended> results;
  for (auto& process : processes) results.push_back(process->result());
  return results;
}

} // namespace shardwise::test
