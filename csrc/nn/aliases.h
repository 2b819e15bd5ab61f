#pragma once

#include "engine/front_end.h"

#include <vector>

namespace shardwise::nn {

/// Marks as `shared` the parameters whose memory other tensors have too. What is cut gets other memory: a view or an
/// alias of it would keep the values of now. Parameters that lie side by side in one piece of memory share nothing.
void find_aliases(std::vector<engine::NamedTensor>& parameters);

} // namespace shardwise::nn
