#pragma once

#include <shardwise/shardwise.h>

#include "model.h"

#include <optional>
#include <stdexcept>
#include <string>

inline shardwise::FullyShardOptions sharding_options(const std::string& wrap) {
  shardwise::FullyShardOptions options;
  if (wrap == "fully_shard_keep") options.reshard_after_forward(false);
  if (wrap == "fully_shard_flat") options.layout(shardwise::ShardLayout::flat);
  return options;
}

/// Wraps each block and the model, as the word says; nothing for `none`. Only the outermost unit has a handle that is
/// needed: its counters are those of the tree.
inline std::optional<shardwise::Unit> distribute(Gpt& model, const std::string& wrap, const shardwise::Mesh& mesh) {
  if (wrap == "none") return std::nullopt;
  const auto sharding = sharding_options(wrap).mesh(mesh);
  const auto apply = [&](torch::nn::Module& module) {
    if (wrap == "replicate") return replicate(module, shardwise::ReplicateOptions().mesh(mesh));
    if (wrap == "hsdp" || wrap.starts_with("fully_shard")) return fully_shard(module, sharding);
    throw std::invalid_argument("bench: there is no --wrap " + wrap + ".");
  };
  for (auto& block : *model->blocks) apply(*block);
  return apply(*model);
}
