#include "nn/hooks/hook_table.h"

#include <algorithm>
#include <mutex>

namespace shardwise::nn {
namespace {

template <typename Function>
void erase(HookList<Function>& list, const HookBase& hook) {
  std::erase_if(list, [&](const auto& entry) { return entry.get() == &hook; });
}

} // namespace

HookTable& HookTable::get() {
  static auto* table = new HookTable;
  return *table;
}

std::shared_ptr<const HookLists> HookTable::find(torch::nn::Module& module) {
  if (size_.load(std::memory_order_acquire) == 0) return nullptr;
  {
    const std::shared_lock lock(mutex_);
    const auto found = entries_.find(&module);
    if (found == entries_.end()) return nullptr;
    if (found->second.life.alive()) return found->second.lists;
  }
  std::shared_ptr<const HookLists> dropped;
  const std::unique_lock lock(mutex_);
  const auto found = entries_.find(&module);
  if (found == entries_.end()) return nullptr;
  auto& entry = found->second;
  if (entry.life.alive() || entry.life.continue_in(module)) return entry.lists;
  dropped = std::move(entry.lists);
  entries_.erase(found);
  size_.store(entries_.size(), std::memory_order_release);
  return nullptr;
}

std::weak_ptr<const void> HookTable::life(const torch::nn::Module& module) const {
  const std::shared_lock lock(mutex_);
  const auto found = entries_.find(&module);
  return found == entries_.end() ? std::weak_ptr<const void>() : found->second.life.pointer();
}

void HookTable::change(torch::nn::Module& module, const std::function<void(HookLists&)>& edit) {
  Dropped dropped;
  const std::unique_lock lock(mutex_);
  if (entries_.size() >= sweep_at_) sweep(dropped);
  const auto found = entries_.find(&module);
  const bool same = found != entries_.end() && (found->second.life.alive() || found->second.life.continue_in(module));
  auto lists = std::make_shared<HookLists>(same ? *found->second.lists : HookLists());
  edit(*lists);
  if (same) {
    dropped.push_back(std::exchange(found->second.lists, std::move(lists)));
  } else {
    if (found != entries_.end()) {
      dropped.push_back(std::move(found->second.lists));
      entries_.erase(found);
    }
    entries_.emplace(&module, Entry{ModuleLife(module), std::move(lists)});
  }
  size_.store(entries_.size(), std::memory_order_release);
}

void HookTable::remove(HookBase& hook) {
  hook.removed = true;
  std::shared_ptr<const HookLists> dropped;
  const std::unique_lock lock(mutex_);
  const auto found = entries_.find(hook.module);
  if (found == entries_.end()) return;
  auto lists = std::make_shared<HookLists>(*found->second.lists);
  erase(lists->forward_pre, hook);
  erase(lists->forward, hook);
  erase(lists->backward_pre, hook);
  erase(lists->backward, hook);
  dropped = std::exchange(found->second.lists, lists);
  if (lists->empty()) entries_.erase(found);
  size_.store(entries_.size(), std::memory_order_release);
}

void HookTable::sweep(Dropped& dropped) {
  std::erase_if(entries_, [&](auto& item) {
    if (!item.second.life.over()) return false;
    dropped.push_back(std::move(item.second.lists));
    return true;
  });
  sweep_at_ = 2 * entries_.size() + 16;
}

} // namespace shardwise::nn
