#pragma once

#include "comm/mesh/axis_group.h"
#include "comm/mesh/process_group.h"

#include <shardwise/detail/export.h>

namespace shardwise::comm {

/// A process group made beside another one, and the processes of its ranks.
struct SecondGroup {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  Processes processes;
};

/// Makes the group of `spec` over a store that was used before. All ranks of `first` (whose numbers are `names`) call
/// this, even if each `spec` has only some of them: a rank that died earlier is noticed by its connections, one that
/// dies meanwhile by its process. Raises PeerError.
SHARDWISE_API SecondGroup make_second_group(c10d::ProcessGroup& first, Ranks names, GroupSpec spec);

} // namespace shardwise::comm
