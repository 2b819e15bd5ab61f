#pragma once

#include "support/variables.h"

#include <chrono>
#include <string>
#include <vector>

namespace shardwise::test {

/// How a process ended.
struct Ended {
  /// -1 when a signal ended it.
  int exit_code = -1;
  /// 0 when none did.
  int signal = 0;
  bool timed_out = false;
  std::chrono::milliseconds after{0};
  /// Standard output and standard error, in the order in which they were written.
  std::string output;

  bool ok() const {
    return exit_code == 0 && !timed_out;
  }
  /// "exit code 1", "signal 9", "ended at the time limit".
  std::string how() const;
};

/// Starts a program per entry, each with the environment of this process and the changes given, and waits for all.
/// At the time limit the ones left get SIGUSR1 (a program of ours prints its stacks), then SIGKILL.
struct Command {
  std::vector<std::string> arguments;
  Environment environment;
};
std::vector<Ended> run_commands(const std::vector<Command>& commands, std::chrono::milliseconds time_limit);

} // namespace shardwise::test
