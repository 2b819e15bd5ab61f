#pragma once

#include "group/extension.h"
#include "group/visible_parameter.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::group {

/// A parameter of a unit, and the parts of its gradient that are on their way. Two tensors where it is sharded: the
/// full leaf that its module computes with, and this rank's shard, which the optimizer sees. Else both are the leaf.
///
/// What the user sees in .grad is always averaged: during a backward the visible gradient is put aside, what autograd
/// accumulates is taken as `fresh`, and the visible one is put back. A backward without synchronisation adds fresh to
/// `pending`, out of sight until a backward with synchronisation averages both.
///
/// Does not keep the leaf alive, only the shard: the leaf's hooks keep the owner of this.
class Parameter {
 public:
  /// Is told of every gradient, on the thread that runs the backward.
  class Listener {
   public:
    virtual ~Listener() = default;
    /// Before autograd looks at .grad; nothing will be accumulated when the gradient is undefined.
    virtual void gradient_arriving(Parameter& parameter, bool defined) = 0;
    /// A gradient was accumulated and taken.
    virtual void gradient_arrived(Parameter& parameter) = 0;
    /// The mean was added to the gradient of its shard.
    virtual void gradient_published(Parameter& parameter) = 0;
  };

  /// `full` is the memory of a leaf that is around another tensor; undefined where the leaf has its own.
  Parameter(std::vector<std::string> names, const at::Tensor& leaf, at::Tensor full = {});

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
  /// The memory of the leaf, with the sizes of what all shards make together.
  at::Tensor full() const {
    return full_.defined() ? full_ : leaf();
  }
  /// The memory of what the optimizer sees: the shard, or all of it where there is none.
  at::Tensor stored() const {
    return shard_.defined() ? shard_ : is_kept_ ? kept_shard() : full();
  }
  /// What the optimizer sees.
  at::Tensor visible() const {
    return visible_ ? visible_->parameter() : stored();
  }
  /// Moves when what a front end shows is written to; stays where touch tells of writes.
  int64_t version() const;
  /// From now on the optimizer sees this instead of what is stored.
  void set_visible(std::shared_ptr<VisibleParameter> visible) {
    visible_ = std::move(visible);
  }
  const std::shared_ptr<VisibleParameter>& visible_parameter() const {
    return visible_;
  }
  /// How it travels; null where its shard is a piece like any other.
  void set_extension(std::shared_ptr<Extension> extension) {
    extension_ = std::move(extension);
  }
  const std::shared_ptr<Extension>& extension() const {
    return extension_;
  }
  /// From now on the leaf has the memory of this tensor; undefined: whatever it has.
  void keep_memory(at::Tensor memory) {
    memory_ = std::move(memory);
  }
  /// Whether somebody gave it other memory, as a cast of a module does that shows the leaf in the place of what trains.
  bool lost_memory() const {
    return memory_.defined() && alive() &&
           live_full().unsafe_storage().unsafeGetStorageImpl() != memory_.storage().unsafeGetStorageImpl();
  }
  /// The leaf has that memory again.
  void restore_memory() const;
  /// From now on its module computes with another leaf, which gets the hooks.
  void replace_leaf(const at::Tensor& leaf, at::Tensor full);
  /// Undefined where there is none.
  at::Tensor shard() const {
    return is_kept_ ? kept_shard() : shard_;
  }
  /// Whether the optimizer trains it, and whether autograd brings gradients to the leaf.
  bool requires_grad() const {
    const auto* shard = visible_ ? nullptr : live_shard();
    return shard != nullptr ? shard->requires_grad() : leaf_requires_grad();
  }
  bool leaf_requires_grad() const;
  /// Both get what the one that somebody changed since the last time has: whoever freezes a member means the parameter.
  void agree_on_requires_grad();
  /// Where the optimizer sees something else, a leaf that modules show can be frozen by itself, until they show it
  /// anew.
  void follow_visible() const;
  /// From now on gradients are published to this tensor. The leaf has the sizes of the whole parameter.
  void set_shard(at::Tensor shard) {
    shard_ = std::move(shard);
  }
  /// Registers a hook on the gradients of the shard, be it trained now or not.
  void add_shard_hook(std::function<at::TensorBase(const at::TensorBase&)> hook) const;
  /// From now on the shard keeps the leaf alive, and this keeps neither: for a module that holds only what stands in
  /// its registry.
  void let_shard_keep_leaf();
  /// The shard, without a share in it: for what is asked often. Null when there is none. Raises Error when it is gone.
  const at::TensorImpl* live_shard() const {
    if (is_kept_) return kept_.expired() ? kept_shard().unsafeGetTensorImpl() : kept_._unsafe_get_target();
    return shard_.defined() ? shard_.unsafeGetTensorImpl() : nullptr;
  }
  /// The same of full().
  const at::TensorImpl& live_full() const;
  /// Identifies the shard, also when it is gone; null when there is none.
  const at::TensorImpl* shard_identity() const {
    return is_kept_ ? kept_._unsafe_get_target() : shard_.defined() ? shard_.unsafeGetTensorImpl() : nullptr;
  }
  bool alive() const {
    return !leaf_.expired();
  }

  /// Puts hooks on the leaf that keep `owner` (of this and of the listener) alive. A post-accumulate hook of the
  /// user's, registered before or after, runs once the gradient is averaged.
  void watch(const std::shared_ptr<void>& owner, Listener& listener);
  /// The owner that watches this leaf; null when there is none.
  static std::shared_ptr<void> owner(const at::Tensor& leaf);

  /// What waits to be averaged, of this backward and of earlier ones without synchronisation; undefined when nothing
  /// does. What is of earlier ones waits on until settle(), for this backward may fail.
  at::Tensor take_local();
  /// What take_local() gave is averaged.
  void settle() {
    pending_ = at::Tensor();
    owed = false;
  }
  bool has_pending() const {
    return pending_.defined();
  }
  /// The end of a backward without synchronisation.
  void keep_for_later();
  /// The same of a gradient that stands at the leaf, where the optimizer sees another tensor.
  void take_leaf_gradient();
  /// The end of a backward that failed or averaged nothing: .grad is as it was, and what came is forgotten.
  void forget_backward();
  /// Adds the mean to .grad.
  void publish(const at::Tensor& mean);
  /// What the leaf has for a gradient from then on, until hide_absent_gradient(). Undefined for nothing.
  void set_absent_gradient(at::Tensor gradient) {
    hide_absent_gradient();
    absent_ = std::move(gradient);
  }
  const at::Tensor& absent_gradient() const {
    return absent_;
  }
  void hide_absent_gradient() const;
  /// After it: runs the user's post-accumulate hook, if there is one.
  void run_hook() const;

  /// A sum over some of the ranks that share it, of earlier backwards: as its gradient is published, and in how many
  /// of those ranks' backwards it was used.
  struct Partial {
    at::Tensor values;
    at::Tensor count;
  };
  Partial partial;

  /// A backward without synchronisation ended since the last sum, and this was trained then: the next sum has it, on
  /// every rank, also where it is frozen by then.
  bool owed = false;
  /// In which backwards without synchronisation are summed; unset: that of its gradients.
  std::optional<at::ScalarType> sum_dtype;
  /// The dimension along which `rows` cuts it.
  int64_t shard_dim = 0;
  /// Every rank keeps all of it, in a sharded unit too.
  bool whole = false;
  /// Its number in its unit.
  size_t index = 0;

 private:
  class PreHook;
  class PreHookNode;
  class PostHook;

  static const PreHook* find_pre_hook(const at::Tensor& leaf);
  void add_pre_hook(const std::shared_ptr<void>& owner, const at::Tensor& leaf);
  void take_post_hook_slot(const std::shared_ptr<void>& owner, const at::Tensor& leaf);
  void replace_pre_hook(const std::shared_ptr<void>& owner, const at::Tensor& leaf);
  void set_aside(const std::shared_ptr<void>& owner, bool defined);
  void collect(const std::shared_ptr<void>& owner, const at::Tensor& leaf);
  void put_back();
  void add_to(at::Tensor& grad, const at::Tensor& mean);
  template <typename Do>
  void with_visible(const Do& act) const;
  at::Tensor kept_shard() const;

  std::vector<std::string> names_;
  c10::weak_intrusive_ptr<at::TensorImpl> leaf_;
  Listener* listener_ = nullptr;
  at::Tensor full_;
  at::Tensor shard_;
  std::shared_ptr<VisibleParameter> visible_;
  std::shared_ptr<Extension> extension_;
  at::Tensor memory_;
  bool is_kept_ = false;
  c10::weak_intrusive_ptr<at::TensorImpl> kept_{c10::intrusive_ptr<at::TensorImpl>()};
  at::Tensor absent_;
  /// What leaf and shard had last.
  bool trained_ = false;
  at::Tensor put_aside_;
  bool aside_ = false;
  at::Tensor fresh_;
  at::Tensor pending_;
  /// The gradient that publish() left in the leaf's .grad.
  c10::weak_intrusive_ptr<at::TensorImpl> published_{c10::intrusive_ptr<at::TensorImpl>()};
};

} // namespace shardwise::group
