#pragma once

#include <shardwise/export.h>

#include <exception>
#include <string>

namespace shardwise::base {

/// An error's text, without torch's stack trace.
std::string text_of(const std::exception& error);

/// The same for quoting inside one of our errors: without the "shardwise: ", "The reason: " and "Details: " that our
/// errors begin and continue with, so that these occur only once.
SHARDWISE_API std::string reason(const std::exception& error);

} // namespace shardwise::base
