#pragma once

#include <ATen/core/Tensor.h>

namespace shardwise::group {

/// Tensor::set_data(), also for a tensor on the meta device that gets data on another: it stays the same tensor, with
/// its hooks and its version.
void replace_data(const at::Tensor& tensor, const at::Tensor& data);

} // namespace shardwise::group
