#pragma once

#include <c10/util/StringUtil.h>

#include <string>
#include <vector>

namespace shardwise::base {

/// A line of an error that lists these items under a title; nothing if there are none.
inline std::string listed(const char* title, const std::vector<std::string>& items) {
  return items.empty() ? "" : c10::str("\n  ", title, ": ", c10::Join(", ", items));
}

} // namespace shardwise::base
