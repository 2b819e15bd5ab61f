#pragma once

#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>

namespace shardwise::transport {

/// A vector of zeros for collectives. If a process group of this process uses shared memory and the device is the CPU,
/// it lies where the other ranks can read it; otherwise it is this process's alone. Only for data that travels between
/// ranks: a forked child gets an error when it first uses it.
SHARDWISE_API at::Tensor shared_zeros(int64_t numel, const at::TensorOptions& options);
/// Whether the tensor lies in memory that other ranks can read.
SHARDWISE_API bool is_shared(const at::TensorBase& tensor);

/// A vector of any content for what comes and goes in each step: on a CPU in the process's arena (same_host/arena.h),
/// shared if that is, where it is cheap to have again. Undefined if there is none, as on a device.
SHARDWISE_API at::Tensor arena_memory(int64_t numel, const at::TensorOptions& options);
/// Whether the tensor lies in an arena, shared or not.
bool is_in_arena(const at::TensorBase& tensor);
/// Gives memory of an arena back until refill_in_arena(). The storage keeps its size; nobody may read it meanwhile.
void free_in_arena(c10::StorageImpl& storage);
/// Gives it memory of any content.
void refill_in_arena(c10::StorageImpl& storage);
/// Returns what no tensor uses of the arena to the system.
void trim_arena();

/// In a forked child: makes every read or write of this storage an error that says why.
void refuse_in_child(c10::StorageImpl& storage);

} // namespace shardwise::transport
