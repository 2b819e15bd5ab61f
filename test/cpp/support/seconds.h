#pragma once

#include <chrono>
#include <string>

namespace shardwise::test {

/// Measures one test after the other. Where SHARDWISE_TEST_SECONDS names a file, end() adds a line to it: title, source
/// file, seconds, and seconds of CPU time of this process and of those that it started and waited for.
class TestSeconds {
 public:
  void begin();
  void end(const std::string& title, const std::string& file) const;

 private:
  std::chrono::steady_clock::time_point began_;
  double cpu_before_ = 0;
};

} // namespace shardwise::test
