#pragma once

// How the rows of fully_shard_training wrap their models.
#include "ranks/training_parity.h"

#include "engine/unit.h"

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

/// Lets these modules' units see where a call of theirs ends, and not only at the first use of another unit.
inline void end_with_calls(const std::vector<std::shared_ptr<torch::nn::Module>>& modules) {
  for (const auto& module : modules) {
    register_forward_hook(*module, [](torch::nn::Module& called, HookTensors&) {
      auto unit = engine::Unit::of(called.parameters().front());
      const auto owns = [&](const at::Tensor& parameter) { return unit->has(parameter); };
      const auto parameters = called.parameters();
      while (!std::all_of(parameters.begin(), parameters.end(), owns)) unit = unit->outer();
      unit->leave();
    });
    observe_calls(*module);
  }
}

/// Along its longest dimension.
inline int64_t longest(const std::string&, const torch::Tensor& parameter) {
  const auto sizes = parameter.sizes();
  return std::max_element(sizes.begin(), sizes.end()) - sizes.begin();
}

} // namespace shardwise::test
