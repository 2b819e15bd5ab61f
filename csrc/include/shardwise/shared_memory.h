#pragma once

#include <shardwise/export.h>

#include <cstdint>
#include <functional>

namespace shardwise {

/// Calls `listener` with each change of the bytes of tensors that lie in memory shared with other ranks, which torch's
/// allocator does not see, from the thread that changes them. It takes the place of an earlier one.
SHARDWISE_API void on_shared_memory(std::function<void(int64_t bytes)> listener);

} // namespace shardwise
