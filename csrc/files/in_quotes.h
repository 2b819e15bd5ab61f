#pragma once

#include <shardwise/detail/export.h>

#include <string>
#include <string_view>

namespace shardwise::files {

/// A name or text that came from a file, for an error: in quotes, cut where it is long, and with what is not printable
/// or no UTF-8 as \x00.
SHARDWISE_API std::string in_quotes(std::string_view text);

/// Whether this is UTF-8.
SHARDWISE_API bool is_utf8(std::string_view text);

} // namespace shardwise::files
