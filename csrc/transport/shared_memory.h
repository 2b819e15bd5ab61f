#pragma once

#include <shardwise/export.h>

#include <ATen/core/Tensor.h>

namespace shardwise::transport {

/// A vector of zeros for collectives: where a process group of this process goes through shared memory, one that the
/// other ranks can read where it lies; an ordinary one else, and on other devices. It is for what is on its way between
/// ranks: in a forked child its first use is an error.
SHARDWISE_API at::Tensor shared_zeros(int64_t numel, const at::TensorOptions& options);
/// Whether the tensor lies in such memory.
bool is_shared(const at::TensorBase& tensor);
/// In a forked child: who reads or writes this storage gets an error that says why not.
void refuse_in_child(c10::StorageImpl& storage);

} // namespace shardwise::transport
