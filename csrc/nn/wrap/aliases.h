#pragma once

#include "engine/front_end.h"

#include <vector>

namespace shardwise::nn {

/// Marks as `shared` the parameters whose memory other tensors use too. A parameter that is cut moves to other memory,
/// so a view or an alias of it would keep its current values. Parameters that only lie side by side in one storage
/// share nothing.
void find_aliases(std::vector<engine::NamedTensor>& parameters);

} // namespace shardwise::nn
