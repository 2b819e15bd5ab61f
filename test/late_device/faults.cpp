#include "faults.h"

#include "device.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <mutex>

namespace late {
namespace {

std::mutex mutex;
std::vector<std::string> faults;
std::array<std::atomic<int64_t>, kDevices> waits;
std::array<std::atomic<uint64_t>, kDevices> captures;
std::atomic<uint64_t> made;

} // namespace

void report(const std::string& fault) {
  const std::lock_guard lock(mutex);
  // A mistake in a loop is one mistake.
  if (faults.size() < 20) std::fprintf(stderr, "late device: %s\n", fault.c_str());
  faults.push_back(fault);
}

std::vector<std::string> take_faults() {
  const std::lock_guard lock(mutex);
  return std::exchange(faults, {});
}

int64_t host_waits(int device) {
  return waits[device];
}

void count_host_wait(int device, const char* what) {
  Capturing::forbid(device, what);
  ++waits[device];
}

Capturing::Capturing(int device) : device_(device) {
  captures[device] = ++made;
}

Capturing::~Capturing() {
  captures[device_] = 0;
}

void Capturing::forbid(int device, const char* what) {
  TORCH_CHECK(captures[device] == 0, "late device: while a graph is captured, the host may not ", what);
}

uint64_t Capturing::on(int device) {
  return captures[device];
}

} // namespace late
