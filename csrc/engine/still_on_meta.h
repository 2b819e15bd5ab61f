#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace shardwise::engine {

/// The text of the error that names what has no values yet, and the remedy; of a rank if that is known.
std::string still_on_meta(std::optional<int64_t> rank, const std::vector<std::string>& names);

/// Zeros of the same sizes and strides on a device.
at::Tensor with_memory(const at::Tensor& tensor, at::Device device);

} // namespace shardwise::engine
