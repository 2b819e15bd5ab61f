#include "meters.h"

#include "tensor_memory.h"

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#define SHARDWISE_METERS_COUNT 1
#else
#define SHARDWISE_METERS_COUNT 0
#endif

#pragma GCC visibility push(default)
extern "C" {

int meters_can_count() {
  return SHARDWISE_METERS_COUNT;
}

#if SHARDWISE_METERS_COUNT

int meters_count_instructions() {
  return static_cast<int>(RUNNING_ON_VALGRIND);
}

void meters_start() {
  CALLGRIND_START_INSTRUMENTATION;
}

void meters_stop() {
  CALLGRIND_STOP_INSTRUMENTATION;
}

void meters_zero() {
  // CALLGRIND_ZERO_STATS leaves some of what was counted before.
  CALLGRIND_DUMP_STATS_AT("before");
}

void meters_dump([[maybe_unused]] const char* name) {
  CALLGRIND_DUMP_STATS_AT(name);
}

#else

int meters_count_instructions() {
  return 0;
}

void meters_start() {}
void meters_stop() {}
void meters_zero() {}
void meters_dump(const char*) {}

#endif

void meters_watch_memory() {
  TensorMemory::watch();
}

void meters_add_memory(int64_t bytes) {
  TensorMemory::add(bytes);
}

int64_t meters_bytes() {
  return TensorMemory::bytes();
}

int64_t meters_peak_bytes() {
  return TensorMemory::peak();
}

void meters_forget_peak() {
  TensorMemory::forget_peak();
}

int64_t meters_allocations() {
  return TensorMemory::allocations();
}

} // extern "C"
#pragma GCC visibility pop
