#pragma once

#include <ATen/core/Tensor.h>

namespace shardwise::group {

/// Tensor::set_data(), also for a tensor on the meta device that gets data on another: it stays the same tensor, with
/// its hooks and its version.
void replace_data(const at::Tensor& tensor, const at::Tensor& data);

/// Whether the tensor's values lie in a storage of its own, where they may be read: not those of a subclass that has an
/// operation of its own for everything, which is around other tensors.
bool is_plain(const at::Tensor& tensor);

} // namespace shardwise::group
