#pragma once

#include <shardwise/export.h>

#include <string>

namespace shardwise::base {

/// A name for this host and its namespace of processes, different from all others.
SHARDWISE_API std::string this_host();

} // namespace shardwise::base
