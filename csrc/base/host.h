#pragma once

#include <shardwise/export.h>

#include <string>

namespace shardwise::base {

/// What tells this host, and who may be seen on it, from others.
SHARDWISE_API std::string this_host();

} // namespace shardwise::base
