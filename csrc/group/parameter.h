#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace shardwise::group {

/// A parameter of a replicated module, and the parts of its gradient that are on their way.
///
/// What the user sees in .grad is always averaged: during a backward the visible gradient is put aside, what autograd
/// accumulates is taken as `fresh`, and the visible one is put back. A backward without synchronisation adds fresh to
/// `pending`, out of sight until a backward with synchronisation averages both.
///
/// Does not keep the leaf alive: the leaf's hooks keep the owner of this.
class Parameter {
 public:
  /// Is told of every gradient, on the thread that runs the backward.
  class Listener {
   public:
    virtual ~Listener() = default;
    /// Before autograd looks at .grad; perhaps nothing will be accumulated.
    virtual void gradient_arriving() = 0;
    /// A gradient was accumulated and taken.
    virtual void gradient_arrived() = 0;
  };

  Parameter(std::vector<std::string> names, const at::Tensor& leaf);

  /// The first of its names; the others are of modules that share it.
  const std::string& name() const {
    return names_.front();
  }
  const std::vector<std::string>& names() const {
    return names_;
  }
  void rename(std::vector<std::string> names) {
    names_ = std::move(names);
  }

  /// Raises Error when its module dropped the tensor after it was wrapped.
  at::Tensor leaf() const;
  bool alive() const {
    return !leaf_.expired();
  }

  /// Puts hooks on the leaf that keep `owner` (of this and of the listener) alive. A post-accumulate hook of the
  /// user's, registered before or after, runs once the gradient is averaged.
  void watch(const std::shared_ptr<void>& owner, Listener& listener);
  /// The owner that watches this leaf; null when there is none.
  static std::shared_ptr<void> owner(const at::Tensor& leaf);

  /// What waits to be averaged, of this backward and of earlier ones without synchronisation; undefined when nothing
  /// does. Nothing waits afterwards.
  at::Tensor take_local();
  /// The end of a backward without synchronisation.
  void keep_for_later();
  /// The end of a backward that failed or averaged nothing: .grad is as it was, and what came is forgotten.
  void forget_backward();
  /// Adds the mean to .grad and runs the user's post-accumulate hook.
  void publish(const at::Tensor& mean);

 private:
  class PreHook;
  class PreHookNode;
  class PostHook;

  static const PreHook* find_pre_hook(const at::Tensor& leaf);
  void add_pre_hook(const std::shared_ptr<void>& owner, const at::Tensor& leaf);
  void take_post_hook_slot(const std::shared_ptr<void>& owner, const at::Tensor& leaf);
  void replace_pre_hook(const std::shared_ptr<void>& owner, const at::Tensor& leaf);
  void set_aside(const std::shared_ptr<void>& owner);
  void collect(const std::shared_ptr<void>& owner, const at::Tensor& leaf);
  void put_back();

  std::vector<std::string> names_;
  c10::weak_intrusive_ptr<at::TensorImpl> leaf_;
  Listener* listener_ = nullptr;
  at::Tensor visible_;
  bool aside_ = false;
  at::Tensor fresh_;
  at::Tensor pending_;
  /// The gradient that publish() left in .grad.
  c10::weak_intrusive_ptr<at::TensorImpl> published_{c10::intrusive_ptr<at::TensorImpl>()};
};

} // namespace shardwise::group
