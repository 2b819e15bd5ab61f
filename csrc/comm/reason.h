#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

namespace shardwise::comm {

/// What an error of c10d says, for use in one of ours: without torch's stack trace.
inline std::string reason(const std::exception& error) {
  const auto* traced = dynamic_cast<const c10::Error*>(&error);
  return traced == nullptr ? error.what() : traced->what_without_backtrace();
}

} // namespace shardwise::comm
