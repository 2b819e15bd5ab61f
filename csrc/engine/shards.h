#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

namespace shardwise::engine {

class Unit;

/// The table of which unit has which shard, by the shard's address. A unit holds on to its shards, so an address means
/// the same tensor as long as its entry exists. Thread safe, since ranks may be threads.
void add_shard(const at::Tensor& shard, const std::weak_ptr<Unit>& unit);
void remove_shard(const at::TensorImpl* shard);
std::shared_ptr<Unit> unit_of_shard(const at::Tensor& shard);

} // namespace shardwise::engine
