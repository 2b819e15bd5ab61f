#pragma once

#include "files/json.h"

#include <string>

namespace shardwise::files {

/// The program's own value as the marker has it. JSON has no numbers that are infinite or none: they become an object
/// of one text, {"number": "inf"}, which no value of a program is.
/// Raises ValueError, with the value's name, for null, an object, and a list of these.
Json json_of_value(const Json& value, const std::string& name);

/// The value again.
/// Raises Error where it is none; `path` is the marker's name.
Json value_of(const Json& json, const std::string& path);

} // namespace shardwise::files
