#pragma once

#include <shardwise/detail/export.h>

#include <c10/util/StringUtil.h>

#include <exception>
#include <string>
#include <vector>

namespace shardwise::base {

/// An error's text, without torch's stack trace.
std::string text_of(const std::exception& error);

/// The same for quoting inside one of our errors: without the "shardwise: ", "The reason: " and "Details: " that our
/// errors begin and continue with, so that these occur only once.
SHARDWISE_API std::string reason(const std::exception& error);

/// A line of an error that lists these items under a title; nothing if there are none.
inline std::string listed(const char* title, const std::vector<std::string>& items) {
  return items.empty() ? "" : c10::str("\n  ", title, ": ", c10::Join(", ", items));
}

} // namespace shardwise::base
