#pragma once

// How the rows of fully_shard_training wrap their models.
#include "ranks/training_parity.h"

namespace shardwise::test {

/// An int, for full copies on fewer ranks after forward, is not there yet.
inline const std::vector<std::optional<bool>> kReshards{true, false, std::nullopt};

/// For wrap_blocks() and its like.
inline auto sharding(const FullyShardOptions& options) {
  return [options](auto modules) { return fully_shard(modules, options); };
}

inline auto sharding(Rank& rank, std::optional<bool> reshard_after_forward) {
  return sharding(sharded_on(rank).reshard_after_forward(reshard_after_forward));
}

/// Along its longest dimension.
inline int64_t longest(const std::string&, const torch::Tensor& parameter) {
  const auto sizes = parameter.sizes();
  return std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
}

} // namespace shardwise::test
