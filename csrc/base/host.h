#pragma once

#include <shardwise/export.h>

#include <cstdint>
#include <string>

namespace shardwise::base {

/// A name for this host and its namespace of processes, different from all others.
SHARDWISE_API std::string this_host();

/// When a process of this host began, in ticks since it booted; 0 if there is no such process. Numbers are used again,
/// but not by two processes that began at one time.
SHARDWISE_API uint64_t process_start_time(int64_t process);

} // namespace shardwise::base
