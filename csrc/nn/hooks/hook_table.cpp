#include "nn/hooks/hook_table.h"

#include <algorithm>
#include <mutex>

namespace shardwise::nn {

ModuleLife::ModuleLife(torch::nn::Module& module) {
  const auto owner = module.weak_from_this();
  if (!owner.expired()) {
    life_ = owner;
    return;
  }
  const auto token = std::make_shared<const char>();
  const std::shared_ptr<torch::nn::Module> ended_owner(&module, [token](torch::nn::Module*) {});
  life_ = token;
  for (const auto& child : module.named_children()) children_.emplace_back(child.value());
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    if (parameter.value().defined()) parameters_.emplace_back(parameter.value().getIntrusivePtr());
  }
}

bool ModuleLife::continue_in(torch::nn::Module& module) {
  const auto owner = module.weak_from_this();
  if (owner.expired() || !has_parts()) return false;
  // Compared without locking the weak pointers: a lock may become the last reference.
  const auto children = module.named_children();
  const auto parameters = module.named_parameters(/*recurse=*/false);
  const bool same = std::all_of(
                        children_.begin(), children_.end(),
                        [&](const Child& child) {
                          return std::any_of(children.begin(), children.end(), [&](const auto& now) {
                            return !child.owner_before(now.value()) && !now.value().owner_before(child);
                          });
                        }) &&
                    std::all_of(parameters_.begin(), parameters_.end(), [&](const Parameter& parameter) {
                      return std::any_of(parameters.begin(), parameters.end(), [&](const auto& now) {
                        return parameter._unsafe_get_target() == now.value().unsafeGetTensorImpl();
                      });
                    });
  if (!same) return false;
  life_ = owner;
  children_.clear();
  parameters_.clear();
  return true;
}

bool ModuleLife::over() const {
  if (alive()) return false;
  const auto is_gone = [](const auto& part) { return part.expired(); };
  return !has_parts() || std::any_of(children_.begin(), children_.end(), is_gone) ||
         std::any_of(parameters_.begin(), parameters_.end(), is_gone);
}

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
  sweep_(entries_, [&](auto& item) {
    if (!item.second.life.over()) return false;
    dropped.push_back(std::move(item.second.lists));
    return true;
  });
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
  const auto is_removed = [&](const auto& entry) { return entry.get() == &hook; };
  std::erase_if(lists->forward_pre, is_removed);
  std::erase_if(lists->forward, is_removed);
  std::erase_if(lists->backward_pre, is_removed);
  std::erase_if(lists->backward, is_removed);
  dropped = std::exchange(found->second.lists, lists);
  if (lists->empty()) entries_.erase(found);
  size_.store(entries_.size(), std::memory_order_release);
}

} // namespace shardwise::nn
