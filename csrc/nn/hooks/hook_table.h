#pragma once

#include "nn/hooks/module_life.h"

#include <shardwise/hooks.h>

#include <atomic>
#include <memory>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

namespace shardwise::nn {

struct HookBase {
  explicit HookBase(const torch::nn::Module* on) : module(on) {}
  virtual ~HookBase() = default;
  HookBase(const HookBase&) = delete;
  HookBase& operator=(const HookBase&) = delete;

  /// Only an address: the module may be gone.
  const torch::nn::Module* const module;
  std::atomic<bool> removed{false};
};

template <typename Function>
struct Hook : HookBase {
  Hook(const torch::nn::Module* on, Function run, bool always)
      : HookBase(on),
        function(std::move(run)),
        always_call(always) {}

  const Function function;
  const bool always_call;
};

template <typename Function>
using HookList = std::vector<std::shared_ptr<Hook<Function>>>;

/// The hooks of one module. Never changed but replaced, so that calls under way keep what they have.
struct HookLists {
  HookList<ForwardPreHook> forward_pre;
  HookList<ForwardHook> forward;
  HookList<BackwardPreHook> backward_pre;
  HookList<BackwardHook> backward;

  bool empty() const {
    return forward_pre.empty() && forward.empty() && backward_pre.empty() && backward.empty();
  }
};

/// The hooks of all modules in this process. Thread safe. No hook is run or destroyed under its lock.
class HookTable {
 public:
  static HookTable& get();

  /// Null if the module has none.
  std::shared_ptr<const HookLists> find(torch::nn::Module& module);
  /// Expires with the module. Empty if that has no hooks.
  std::weak_ptr<const void> life(const torch::nn::Module& module) const;

  template <typename Function>
  void add(
      torch::nn::Module& module, HookList<Function> HookLists::*kind, const std::shared_ptr<Hook<Function>>& hook,
      bool prepend) {
    change(module, [&](HookLists& lists) {
      auto& list = lists.*kind;
      list.insert(prepend ? list.begin() : list.end(), hook);
    });
  }
  void remove(HookBase& hook);

 private:
  struct Entry {
    ModuleLife life;
    std::shared_ptr<const HookLists> lists;
  };
  using Dropped = std::vector<std::shared_ptr<const HookLists>>;

  void change(torch::nn::Module& module, const std::function<void(HookLists&)>& edit);
  void sweep(Dropped& dropped);

  /// Read without the lock, so that a process without hooks pays for nothing else.
  std::atomic<size_t> size_{0};
  size_t sweep_at_ = 16;
  mutable std::shared_mutex mutex_;
  std::unordered_map<const torch::nn::Module*, Entry> entries_;
};

} // namespace shardwise::nn
