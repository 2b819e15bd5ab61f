#pragma once

#include "comm/axis_group.h"
#include "comm/process_group.h"

#include <shardwise/export.h>

#include <string>
#include <vector>

namespace shardwise::comm {

/// A process group of ranks that had one already, and what each of them had to say.
struct SecondGroup {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  Processes processes;
};

/// Makes the group of `spec` together with its other ranks, over a store that was used before. All ranks of `first`, by
/// these names, come here, though `spec` may have some of them alone: a rank that died before that is noticed by its
/// connections, one that dies later by its process. Raises PeerError.
SHARDWISE_API SecondGroup make_beside(c10d::ProcessGroup& first, Ranks names, GroupSpec spec);

} // namespace shardwise::comm
