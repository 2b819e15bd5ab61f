#pragma once

#include "base/descriptor.h"

#include <shardwise/detail/export.h>

#include <cstdint>
#include <string>

namespace shardwise::base {

/// A name for this host and its namespace of processes, different from all others.
SHARDWISE_API std::string this_host();

/// When a process of this host began, in ticks since it booted; 0 if there is no such process. Numbers are used again,
/// but not by two processes that began at one time.
SHARDWISE_API uint64_t process_start_time(int64_t process);

/// Watches a process of this host: a pidfd. None if it cannot be watched; errno then says why.
SHARDWISE_API Descriptor watch_process(int64_t process);
/// Whether a watched process has ended. One that is stopped has not.
SHARDWISE_API bool process_ended(const Descriptor& watched);

} // namespace shardwise::base
