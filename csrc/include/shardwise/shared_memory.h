#pragma once

#include <shardwise/export.h>

#include <cstdint>
#include <functional>

namespace shardwise {

/// From now on calls `listener` with each change in the bytes of tensors that lie in memory shared with other ranks,
/// which torch's allocator does not see. Called on the thread that makes the change. Replaces an earlier listener.
SHARDWISE_API void on_shared_memory(std::function<void(int64_t bytes)> listener);

} // namespace shardwise
