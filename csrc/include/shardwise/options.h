#pragma once

#include <shardwise/mesh.h>

#include <ATen/core/Tensor.h>
#include <torch/arg.h>

#include <optional>
#include <string>
#include <vector>

namespace shardwise {

/// What replicate() may be told. Everything has a default.
struct SHARDWISE_API ReplicateOptions {
  /// The ranks that hold copies: a mesh of one axis. Unset: Mesh::shared().
  TORCH_ARG(std::optional<Mesh>, mesh) = std::nullopt;
  /// Parameters that are left alone.
  TORCH_ARG(std::vector<at::Tensor>, ignored_parameters) = {};
  /// Give every rank the parameters and buffers of rank 0 first.
  TORCH_ARG(bool, broadcast) = true;
};

} // namespace shardwise
