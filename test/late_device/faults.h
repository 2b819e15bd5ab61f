#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace late {

/// A mistake of the program, found by the device: it is printed at once and kept. A test that leaves any behind fails.
void report(const std::string& fault);
/// Takes what was reported since the last call.
std::vector<std::string> take_faults();

/// How often the host waited for a device since the process began: for a stream, an event, a value, a blocking copy.
int64_t host_waits(int device);
void count_host_wait(int device, const char* what);

/// While one lives, what a captured graph may not do on this thread's device raises c10::Error: waits of the host, and
/// memory from the system.
class Capturing {
 public:
  explicit Capturing(int device);
  ~Capturing();
  Capturing(const Capturing&) = delete;
  Capturing& operator=(const Capturing&) = delete;
  static void forbid(int device, const char* what);
  /// Its number, which no other has; 0 if there is none.
  static uint64_t on(int device);

 private:
  int device_;
};

} // namespace late
