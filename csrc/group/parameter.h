#pragma once

#include "group/extension.h"
#include "group/visible_parameter.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::group {

/// A parameter of a unit, and the parts of its gradient that are on their way. A sharded parameter is two tensors: the
/// full leaf that its module computes with, and this rank's shard, which the optimizer updates. Otherwise both are the
/// leaf. Between them, values pass through two buffers of the parameter's group:
///
///   shard --all-gather--> gathered --copy--> full leaf        (group/full_copies.h)
///   .grad <--reduce-scatter-- bucket <--copy-- gradient       (group/gradients.h)
///
/// .grad has averaged gradients only: during a backward the one in .grad is put aside, what autograd accumulates is
/// taken as fresh_, and the one put aside is put back. A backward without synchronisation adds fresh_ to pending_,
/// which stays out of .grad until a backward with synchronisation averages both.
///
/// Owns only the shard, not the leaf: the leaf's hooks own the owner of this object.
class Parameter {
 public:
  /// Gets a call for every gradient, on the thread that runs the backward.
  class Listener {
   public:
    virtual ~Listener() = default;
    /// Before autograd looks at .grad. If the gradient is undefined, nothing will be accumulated.
    virtual void gradient_arriving(Parameter& parameter, bool defined) = 0;
    /// Whether the current backward runs inside another one, whose gradients are summed first.
    virtual bool is_inside_another() const = 0;
    /// A gradient was accumulated and taken.
    virtual void gradient_arrived(Parameter& parameter) = 0;
    /// This gradient of a shard is the mean, or the mean was added to it.
    virtual void gradient_published(const at::Tensor& gradient) = 0;
  };

  /// `full` has the memory of a leaf that wraps another tensor; undefined if the leaf has its own.
  Parameter(std::vector<std::string> names, const at::Tensor& leaf, at::Tensor full = {});

  /// The first of its names. The others come from modules that share it.
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
  /// The tensor with the leaf's memory, in the sizes of the whole parameter.
  at::Tensor full() const {
    return full_.defined() ? full_ : leaf();
  }
  /// The tensor with the memory of what the optimizer sees: the shard, or the whole parameter if there is none.
  at::Tensor stored() const {
    return shard_.defined() ? shard_ : is_kept_ ? kept_shard() : full();
  }
  /// What the optimizer sees.
  at::Tensor visible() const {
    return visible_ ? visible_->parameter() : stored();
  }
  /// A version that moves when a tensor that a front end shows is written to; always 0 where the touch trigger reports
  /// writes.
  int64_t version() const;
  /// From now on the optimizer sees this instead of what is stored.
  void set_visible(std::shared_ptr<VisibleParameter> visible) {
    visible_ = std::move(visible);
    follow_sum_dtype();
  }
  const std::shared_ptr<VisibleParameter>& visible_parameter() const {
    return visible_;
  }
  /// Null if its shard is an ordinary piece.
  void set_extension(std::shared_ptr<Extension> extension) {
    extension_ = std::move(extension);
  }
  const std::shared_ptr<Extension>& extension() const {
    return extension_;
  }
  /// From now on the leaf must have the memory of this tensor; undefined: it may have any memory.
  void keep_memory(at::Tensor memory) {
    memory_ = std::move(memory);
  }
  /// Whether the leaf was given other memory, as by a cast of a module that shows the leaf in place of what trains.
  bool lost_memory() const {
    if (!memory_.defined() || !alive()) return false;
    const auto& full = full_.defined() ? *full_.unsafeGetTensorImpl() : *leaf_._unsafe_get_target();
    return full.unsafe_storage().unsafeGetStorageImpl() !=
           memory_.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  }
  /// Gives that memory back to the leaf.
  void restore_memory() const;
  /// From now on its module computes with another leaf, which gets the hooks.
  void replace_leaf(const at::Tensor& leaf, at::Tensor full);
  /// Undefined if there is none.
  at::Tensor shard() const {
    return is_kept_ ? kept_shard() : shard_;
  }
  /// Whether the optimizer trains it, and whether autograd brings gradients to the leaf.
  bool requires_grad() const {
    const auto* shard = visible_ ? nullptr : live_shard();
    return shard != nullptr ? shard->requires_grad() : leaf_requires_grad();
  }
  bool leaf_requires_grad() const {
    return leaf_.expired() ? leaf().requires_grad() : leaf_._unsafe_get_target()->requires_grad();
  }
  /// Makes the leaf and the shard agree. The one that changed since the last call counts: freezing a member freezes the
  /// parameter.
  void agree_on_requires_grad();
  /// The leaf takes over requires_grad from the tensor that the optimizer sees. A leaf that modules show can be frozen
  /// by itself, but only until they show it again.
  void follow_visible() const;
  /// From now on gradients are published to this tensor. The leaf has the sizes of the whole parameter.
  void set_shard(at::Tensor shard) {
    shard_ = std::move(shard);
  }
  /// Registers a hook on the gradients that autograd brings to the shard, whether it is trained now or not.
  void add_shard_hook(std::function<at::TensorBase(const at::TensorBase&)> hook) const;
  /// From now on the shard keeps the leaf alive, and this object neither of them: for a module that holds only what is
  /// in its registry.
  void let_shard_keep_leaf();
  /// The shard, without a new handle on it: for frequent calls. Null if there is none. Raises Error if it is gone.
  const at::TensorImpl* live_shard() const {
    if (is_kept_) return kept_.expired() ? kept_shard().unsafeGetTensorImpl() : kept_._unsafe_get_target();
    return shard_.defined() ? shard_.unsafeGetTensorImpl() : nullptr;
  }
  /// The same for full().
  const at::TensorImpl& live_full() const {
    return full_.defined() || leaf_.expired() ? *full().unsafeGetTensorImpl() : *leaf_._unsafe_get_target();
  }
  /// Identifies the shard, even when it is gone; null if there is none.
  const at::TensorImpl* shard_identity() const {
    return is_kept_ ? kept_._unsafe_get_target() : shard_.defined() ? shard_.unsafeGetTensorImpl() : nullptr;
  }
  bool alive() const {
    return !leaf_.expired();
  }

  /// Puts hooks on the leaf that keep `owner` alive, which owns this and the listener. A post-accumulate hook of the
  /// user's, registered before or after, runs once the gradient is averaged.
  void watch(const std::shared_ptr<void>& owner, Listener& listener);
  /// The owner that watches this leaf; null if there is none.
  static std::shared_ptr<void> owner(const at::Tensor& leaf);

  /// What waits to be averaged, from this backward and from earlier ones without synchronisation; undefined if nothing
  /// does. The part from earlier ones stays until mark_averaged(), since this backward may fail.
  at::Tensor take_local();
  /// What take_local() gave has been averaged.
  void mark_averaged() {
    owed = false;
    if (!pending_.defined()) return;
    pending_ = at::Tensor();
    follow_sum_dtype();
  }
  bool has_pending() const {
    return pending_.defined();
  }
  /// The gradient of this backward, until it is taken; else undefined.
  const at::Tensor& fresh() const {
    return fresh_;
  }
  /// After the sum of the backward: makes gradients of those inside it the fresh ones.
  void turn_to_inside() {
    fresh_ = std::exchange(inside_, at::Tensor());
  }
  bool has_inside() const {
    return inside_.defined();
  }
  /// The end of a backward without synchronisation.
  void keep_for_later();
  /// If Python's modules show the leaf, its gradient is what a backward without synchronisation left, as in torch,
  /// until the next backward.
  void show_pending();
  void hide_pending();
  /// Takes a gradient that the program put on the leaf, where the optimizer sees another tensor, as keep_for_later()
  /// would. What show_pending() put there counts as the program left it.
  void take_leaf_gradient();
  /// The end of a backward that failed or averaged nothing: .grad is as it was, and new gradients are forgotten.
  void forget_backward();
  /// Adds the mean to .grad. If that is a shard's, the user's hooks on the shard run first.
  void publish(const at::Tensor& mean);
  /// What publish() leaves on the leaf as its gradient, until hide_absent_gradient(). Undefined for nothing.
  void set_absent_gradient(at::Tensor gradient) {
    hide_absent_gradient();
    absent_ = std::move(gradient);
  }
  const at::Tensor& absent_gradient() const {
    return absent_;
  }
  void hide_absent_gradient() const;
  /// Runs the user's post-accumulate hook, if there is one: once after publish(), however often that was called.
  void run_hook();
  void forget_hook() {
    hook_due_ = false;
  }

  /// The sum of earlier backwards over some of the ranks that share it: its values, in the form in which the gradient
  /// is published, and in how many of those ranks' backwards it was used.
  struct Partial {
    at::Tensor values;
    at::Tensor count;
  };
  Partial partial;

  /// A backward without synchronisation ended since the last sum while this was trained: the next sum includes it, on
  /// every rank, even if it is frozen by then.
  bool owed = false;
  /// From now on its gradients are summed in this dtype.
  void sum_in(at::ScalarType dtype);
  /// Whether the next backward synchronises.
  void set_sync(bool value) {
    if (std::exchange(syncs_, value) != value) follow_sum_dtype();
  }

  /// The dtype of its full copy, where it is not the one that its unit computes in.
  std::optional<at::ScalarType> full_dtype;
  /// The dtype of its gradient, where it is not its own.
  std::optional<at::ScalarType> grad_dtype;
  /// The dimension along which `rows` cuts it.
  int64_t shard_dim = 0;
  /// Every rank keeps all of it, even in a sharded unit.
  bool whole = false;
  /// Its number in its unit.
  size_t index = 0;

 private:
  class PreHook;
  class PostHook;
  struct ShardHook;

  static const PreHook* find_pre_hook(const at::Tensor& leaf);
  void add_pre_hook(const std::shared_ptr<void>& owner, const at::Tensor& leaf);
  void take_post_hook_slot(const std::shared_ptr<void>& owner, const at::Tensor& leaf);
  void replace_pre_hook(const std::shared_ptr<void>& owner, const at::Tensor& leaf);
  void set_aside(const std::shared_ptr<void>& owner, bool defined);
  void collect(const std::shared_ptr<void>& owner, const at::Tensor& leaf);
  at::Tensor as_in_sum(const at::Tensor& gradient) const;
  void put_back();
  void follow_sum_dtype() const;
  bool is_apart() const;
  void add_to(at::Tensor& grad, const at::Tensor& mean);
  at::Tensor run_shard_hooks(const at::Tensor& shard, const at::Tensor& mean) const;
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
  /// What requires_grad() was when leaf and shard last agreed.
  bool trained_ = false;
  at::Tensor put_aside_;
  bool aside_ = false;
  at::Tensor fresh_;
  /// The same from backwards inside this one. Kept apart, since the sum may have begun when they arrive.
  at::Tensor inside_;
  /// publish() was called since the user's hook ran.
  bool hook_due_ = false;
  at::Tensor pending_;
  bool shows_pending_ = false;
  std::optional<at::ScalarType> sum_dtype_;
  bool syncs_ = true;
  /// The gradient that publish() left in .grad.
  c10::weak_intrusive_ptr<at::TensorImpl> published_{c10::intrusive_ptr<at::TensorImpl>()};
};

} // namespace shardwise::group
