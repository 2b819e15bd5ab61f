#pragma once

#include <shardwise/export.h>

#include <string>

namespace shardwise {

/// Writes down, from now on, what the ranks of this process do and when: forwards and backwards of units, collectives
/// from their start until they are done, and how long this rank waited for them. What was written before is dropped.
/// Thread safe. A step that is recorded takes a little longer; one that is not, no longer than without it.
///
/// The environment variable SHARDWISE_RECORD, a folder, does it for a whole program: each process makes a file there
/// when it makes its first unit, which raises Error where it cannot, and fills it at its end. `python -m shardwise
/// timeline FOLDER` draws them.
SHARDWISE_API void start_record();

/// Ends it. One event is {"kind", "name", "rank", "begin", "end", "bytes"}, in nanoseconds since 1970; the text is a
/// list of them in JSON.
SHARDWISE_API std::string stop_record();

} // namespace shardwise
