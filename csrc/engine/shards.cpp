#include "engine/shards.h"

#include "base/weak_table.h"

namespace shardwise::engine {
namespace {

base::WeakTable<const at::TensorImpl*, Unit>& table() {
  static auto* table = new base::WeakTable<const at::TensorImpl*, Unit>;
  return *table;
}

} // namespace

void add_shard(const at::Tensor& shard, const std::weak_ptr<Unit>& unit) {
  table().set(shard.unsafeGetTensorImpl(), unit);
}

void remove_shard(const at::TensorImpl* shard) {
  table().erase(shard);
}

std::shared_ptr<Unit> unit_of_shard(const at::Tensor& shard) {
  return table().find(shard.unsafeGetTensorImpl());
}

} // namespace shardwise::engine
