#pragma once

#include "base/weak_table.h"

#include <shardwise/hooks.h>

#include <c10/core/TensorImpl.h>
#include <torch/nn/module.h>

#include <atomic>
#include <memory>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

namespace shardwise::nn {

/// Tells whether the module at an address is still the one that was there. Keeps no module alive.
///
/// For a module that a shared_ptr owns this is its own weak_ptr. In any other module, the empty weak_ptr of
/// shared_from_this() is given an expired owner of ours, whose deleter holds a token: the token lives until the module
/// dies, or until a shared_ptr takes the module over. shared_from_this() throws as before.
class ModuleLife {
 public:
  explicit ModuleLife(torch::nn::Module& module);

  bool alive() const {
    return !life_.expired();
  }
  /// Expires with the module. What lock() returns keeps the module alive if a shared_ptr owns it.
  std::weak_ptr<const void> pointer() const {
    return life_;
  }
  /// For a life that ended: goes on with the module at the same address, if a shared_ptr took that over since. It
  /// counts as the same module if it still has the parameters and children that it had.
  bool continue_in(torch::nn::Module& module);
  /// Whether it has ended and can never go on.
  bool over() const;

 private:
  using Child = std::weak_ptr<torch::nn::Module>;
  using Parameter = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  bool has_parts() const {
    return !children_.empty() || !parameters_.empty();
  }

  std::weak_ptr<const void> life_;
  std::vector<Child> children_;
  std::vector<Parameter> parameters_;
};

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

  /// Read without the lock, so that a process without hooks pays for nothing else.
  std::atomic<size_t> size_{0};
  base::Sweep sweep_;
  mutable std::shared_mutex mutex_;
  std::unordered_map<const torch::nn::Module*, Entry> entries_;
};

} // namespace shardwise::nn
