#include "engine/shards.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace shardwise::engine {
namespace {

struct ShardTable {
  std::shared_mutex mutex;
  std::unordered_map<const at::TensorImpl*, std::weak_ptr<Unit>> units;

  static ShardTable& get() {
    static auto* table = new ShardTable;
    return *table;
  }
};

} // namespace

void add_shard(const at::Tensor& shard, const std::weak_ptr<Unit>& unit) {
  auto& table = ShardTable::get();
  const std::unique_lock lock(table.mutex);
  table.units[shard.unsafeGetTensorImpl()] = unit;
}

void remove_shard(const at::TensorImpl* shard) {
  auto& table = ShardTable::get();
  const std::unique_lock lock(table.mutex);
  table.units.erase(shard);
}

std::shared_ptr<Unit> unit_of_shard(const at::Tensor& shard) {
  auto& table = ShardTable::get();
  const std::shared_lock lock(table.mutex);
  const auto entry = table.units.find(shard.unsafeGetTensorImpl());
  return entry == table.units.end() ? nullptr : entry->second.lock();
}

} // namespace shardwise::engine
