#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace shardwise::base {

/// Drops what is gone from a table, from time to time: in constant time per insertion on average.
class Sweep {
 public:
  /// To be called before an entry is added. `is_gone` says which entries may be dropped.
  template <typename Table, typename IsGone>
  void operator()(Table& table, const IsGone& is_gone) {
    if (table.size() < many_) return;
    std::erase_if(table, is_gone);
    many_ = 2 * table.size() + kFew;
  }

 private:
  static constexpr std::size_t kFew = 16;
  std::size_t many_ = kFew;
};

/// Finds objects by a key while they live, from any thread; owns none of them. A table for the whole
/// process is never destroyed, because its objects may outlive any static object.
template <typename Key, typename Value>
class WeakTable {
 public:
  std::shared_ptr<Value> find(const Key& key) const {
    const std::shared_lock lock(mutex_);
    const auto entry = entries_.find(key);
    return entry == entries_.end() ? nullptr : entry->second.lock();
  }
  void set(const Key& key, std::weak_ptr<Value> value) {
    const std::unique_lock lock(mutex_);
    put(key, std::move(value));
  }
  void erase(const Key& key) {
    const std::unique_lock lock(mutex_);
    entries_.erase(key);
  }
  /// The existing value, or else what make() returns, which may be null. The table is locked meanwhile.
  template <typename Make>
  std::shared_ptr<Value> find_or_make(const Key& key, const Make& make) {
    const std::unique_lock lock(mutex_);
    const auto entry = entries_.find(key);
    if (entry != entries_.end()) {
      if (auto value = entry->second.lock()) return value;
    }
    std::shared_ptr<Value> value = make();
    if (value) put(key, value);
    return value;
  }
  /// All values that live, in no particular order.
  std::vector<std::shared_ptr<Value>> living() const {
    std::vector<std::shared_ptr<Value>> all;
    const std::shared_lock lock(mutex_);
    for (const auto& [key, weak] : entries_) {
      if (auto value = weak.lock()) all.push_back(std::move(value));
    }
    return all;
  }

 private:
  void put(const Key& key, std::weak_ptr<Value> value) {
    sweep_(entries_, [](const auto& entry) { return entry.second.expired(); });
    entries_.insert_or_assign(key, std::move(value));
  }

  mutable std::shared_mutex mutex_;
  std::unordered_map<Key, std::weak_ptr<Value>> entries_;
  Sweep sweep_;
};

} // namespace shardwise::base
