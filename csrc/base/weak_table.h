#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace shardwise::base {

/// Things that are found by a key as long as they live, from any thread; it owns none of them. Entries of those that
/// are gone are dropped now and then, so that many are added in no more time each than few. A table for the whole
/// process is never destroyed: what is in it may go later than any static object.
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
  /// The one that is there, or what make() gives, which may be null. Nobody else comes here meanwhile.
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
  /// All that live, in no order.
  std::vector<std::shared_ptr<Value>> living() const {
    std::vector<std::shared_ptr<Value>> all;
    const std::shared_lock lock(mutex_);
    for (const auto& [key, weak] : entries_) {
      if (auto value = weak.lock()) all.push_back(std::move(value));
    }
    return all;
  }

 private:
  static constexpr std::size_t kFew = 16;

  void put(const Key& key, std::weak_ptr<Value> value) {
    entries_.insert_or_assign(key, std::move(value));
    if (entries_.size() < many_) return;
    std::erase_if(entries_, [](const auto& entry) { return entry.second.expired(); });
    many_ = 2 * entries_.size() + kFew;
  }

  mutable std::shared_mutex mutex_;
  std::unordered_map<Key, std::weak_ptr<Value>> entries_;
  /// When there are so many, those that are gone are looked for.
  std::size_t many_ = kFew;
};

} // namespace shardwise::base
