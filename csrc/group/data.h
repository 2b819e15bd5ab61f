#pragma once

#include <ATen/core/Tensor.h>

namespace shardwise::group {

/// Does what Tensor::set_data() does, also between the meta device and others. The tensor stays the same object, with
/// its hooks and its version.
void replace_data(const at::Tensor& tensor, const at::Tensor& data);

/// Whether the tensor's values can be read from its storage. False for a subclass that wraps other tensors and
/// implements every operation itself.
bool is_plain(const at::Tensor& tensor);

} // namespace shardwise::group
