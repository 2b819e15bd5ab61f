#pragma once

#include <exception>
#include <string>

namespace shardwise::base {

/// What an error says, without torch's stack trace.
std::string text_of(const std::exception& error);

/// The same for use as the reason in one of ours: the words that errors of ours begin with, and give their own reason
/// with, then stand there once.
std::string reason(const std::exception& error);

} // namespace shardwise::base
