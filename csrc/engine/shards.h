#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace shardwise::engine {

class Unit;

/// Which unit has which shard. A unit keeps its shards, so an address stands for one tensor as long as the entry is
/// here. Thread safe: ranks may be threads.
void add_shard(const at::Tensor& shard, const std::weak_ptr<Unit>& unit);
void remove_shard(const at::TensorImpl* shard);
std::shared_ptr<Unit> unit_of_shard(const at::Tensor& shard);

} // namespace shardwise::engine
