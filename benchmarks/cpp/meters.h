#pragma once

#include <cstdint>

// Plain C, so that Python can load it with ctypes: both languages are measured by the same code.
extern "C" {

/// Whether this library was built where valgrind's headers are, and also whether this process runs under valgrind.
int meters_can_count();
int meters_count_instructions();
/// From now on instructions are counted, or no longer. What runs uncounted goes much faster under valgrind.
void meters_start();
void meters_stop();
/// Counts from zero.
void meters_zero();
/// Writes what was counted since meters_zero() into a file of callgrind's, under this name.
void meters_dump(const char* name);

/// From now on, the bytes of tensors on the CPU are counted, of all threads.
void meters_watch_memory();
/// Bytes that another allocator than torch's gave to tensors, or took back.
void meters_add_memory(int64_t bytes);
/// Bytes now, the most since meters_forget_peak(), and how many pieces were allocated so far.
int64_t meters_bytes();
int64_t meters_peak_bytes();
void meters_forget_peak();
int64_t meters_allocations();
}
