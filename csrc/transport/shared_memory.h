#pragma once

#include <shardwise/export.h>

#include <ATen/core/Tensor.h>

namespace shardwise::transport {

/// A vector of zeros for collectives. If a process group of this process uses shared memory and the device is the CPU,
/// it lies where the other ranks can read it; otherwise it is an ordinary tensor. Only for data that travels between
/// ranks: a forked child gets an error when it first uses it.
SHARDWISE_API at::Tensor shared_zeros(int64_t numel, const at::TensorOptions& options);
/// Whether the tensor lies in such memory.
bool is_shared(const at::TensorBase& tensor);
/// In a forked child: makes every read or write of this storage an error that says why.
void refuse_in_child(c10::StorageImpl& storage);

} // namespace shardwise::transport
