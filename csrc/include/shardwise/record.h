#pragma once

#include <shardwise/detail/export.h>

#include <string>

namespace shardwise {

/// From now on records what the ranks of this process do and when: forwards and backwards of units, those of a
/// pipeline's stages ("2F3": stage 2, forward of microbatch 3), collectives from their start until they are done, and
/// how long this rank waited for them. Drops an earlier record. Thread safe. A step takes a little longer while it is
/// recorded, and no longer otherwise.
///
/// The environment variable SHARDWISE_RECORD, a folder, records a whole program: each process makes a file there when
/// it makes its first unit, which raises Error if it cannot, and fills it at its end. `python -m shardwise timeline
/// FOLDER` draws them.
SHARDWISE_API void start_record();

/// Ends the record and returns it: a list in JSON of events {"kind", "name", "rank", "begin", "end", "bytes"}, with
/// times in nanoseconds since 1970.
SHARDWISE_API std::string stop_record();

} // namespace shardwise
