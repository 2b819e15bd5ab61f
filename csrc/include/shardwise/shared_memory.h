#pragma once

#include <shardwise/detail/export.h>

#include <cstdint>
#include <functional>

namespace shardwise {

/// From now on calls `listener` with each change in the bytes of tensors in the process's arena, which ranks of one
/// host share and torch's allocator does not count. The thread that makes the change calls it. Replaces an earlier
/// listener.
SHARDWISE_API void set_shared_memory_listener(std::function<void(int64_t bytes)> listener);

} // namespace shardwise
