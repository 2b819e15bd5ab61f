#include "group/parameter.h"

#include "base/caller.h"
#include "base/compute_guard.h"
#include "base/tensor_hooks.h"
#include "base/torch_versions.h"
#include "group/data.h"

#include <shardwise/error.h>

#include <ATen/ops/add.h>
#include <ATen/ops/detach.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace shardwise::group {

namespace autograd = torch::autograd;

class Parameter::PreHook {
 public:
  PreHook(std::shared_ptr<void> owner, Parameter& parameter) : owner_(std::move(owner)), parameter_(&parameter) {}

  /// Returns an undefined tensor: the gradient stays as it is.
  at::TensorBase operator()(const at::TensorBase& gradient) const {
    base::called_by_torch([&] { parameter_->set_aside(owner_, gradient.defined()); });
    return {};
  }

 private:
  friend class Parameter;
  std::shared_ptr<void> owner_;
  Parameter* parameter_;
};

class Parameter::PostHook : public autograd::PostAccumulateGradHook {
 public:
  PostHook(std::shared_ptr<void> owner, Parameter& parameter, std::unique_ptr<autograd::PostAccumulateGradHook> users)
      : owner_(std::move(owner)),
        parameter_(parameter),
        users_(std::move(users)) {}

  void operator()(const autograd::Variable& leaf) override {
    base::called_by_torch([&] { parameter_.collect(owner_, leaf); });
  }

 private:
  friend class Parameter;
  std::shared_ptr<void> owner_;
  Parameter& parameter_;
  std::unique_ptr<autograd::PostAccumulateGradHook> users_;
};

/// One of our hooks, which only autograd runs.
struct Parameter::ShardHook {
  base::TensorHook hook;
  at::TensorBase operator()(const at::TensorBase& gradient) const {
    return hook(gradient);
  }
};

Parameter::Parameter(std::vector<std::string> names, const at::Tensor& leaf, at::Tensor full)
    : names_(std::move(names)),
      leaf_(leaf.getIntrusivePtr()),
      full_(std::move(full)) {}

namespace {

at::Tensor lock(const c10::weak_intrusive_ptr<at::TensorImpl>& tensor, const std::string& name) {
  auto impl = tensor.lock();
  if (!impl) {
    throw Error(c10::str(
        "shardwise: the wrapped parameter '", name,
        "' is gone: its module was destroyed, or now holds another tensor, whose gradient would stay on this rank. "
        "Keep the module as long as its unit is used. Replace parameters before replicate() or "
        "fully_shard(), or change them in place."));
  }
  return at::Tensor(std::move(impl));
}

} // namespace

at::Tensor Parameter::leaf() const {
  return lock(leaf_, name());
}

void Parameter::agree_on_requires_grad() {
  const auto* shard = visible_ ? nullptr : live_shard();
  if (shard != nullptr && shard->requires_grad() == trained_ && leaf_requires_grad() != trained_) {
    stored().set_requires_grad(!trained_);
  }
  trained_ = requires_grad();
  if (leaf_requires_grad() != trained_) leaf().set_requires_grad(trained_);
}

void Parameter::follow_visible() const {
  if (!visible_) return;
  const bool is_trained = visible_->parameter().requires_grad();
  if (is_trained != leaf_requires_grad()) leaf().set_requires_grad(is_trained);
}

at::Tensor Parameter::kept_shard() const {
  return lock(kept_, name());
}

void Parameter::watch(const std::shared_ptr<void>& owner, Listener& listener) {
  listener_ = &listener;
  const auto tensor = leaf();
  add_pre_hook(owner, tensor);
  take_post_hook_slot(owner, tensor);
}

void Parameter::replace_leaf(const at::Tensor& leaf, at::Tensor full) {
  const auto owner = Parameter::owner(this->leaf());
  hide_pending();
  leaf_ = c10::weak_intrusive_ptr<at::TensorImpl>(leaf.getIntrusivePtr());
  full_ = std::move(full);
  memory_ = at::Tensor();
  watch(owner, *listener_);
  follow_sum_dtype();
}

void Parameter::sum_in(at::ScalarType dtype) {
  sum_dtype_ = dtype;
  follow_sum_dtype();
}

// Whether the optimizer sees another tensor than the leaf.
bool Parameter::is_apart() const {
  return visible_ || shard_identity() != nullptr;
}

// As torch's engine does it. A gradient narrower than the sum stays as it was computed, since the copy into the bucket
// widens it. Exceptions: the first one of several backwards, to which the others are added, and one that is part of a
// sum over other ranks.
void Parameter::follow_sum_dtype() const {
  if (!base::kGradientsKeepTheirDtype || !sum_dtype_ || !at::isFloatingType(*sum_dtype_)) return;
  if (!alive() || !is_apart()) return;
  const auto tensor = leaf();
  const bool widens = c10::elementSize(*sum_dtype_) > c10::elementSize(tensor.scalar_type());
  const bool is_summed_first = visible_ && visible_->may_sum_arriving();
  const bool stays = widens && !is_summed_first && (syncs_ || pending_.defined());
  const auto dtype = stays ? std::nullopt : sum_dtype_;
  if (tensor.grad_dtype() != dtype) tensor.set_grad_dtype(dtype);
}

void Parameter::restore_memory() const {
  const base::ComputeGuard guard;
  replace_data(full(), memory_);
}

void Parameter::add_shard_hook(std::function<at::TensorBase(const at::TensorBase&)> hook) const {
  base::add_hook(stored(), ShardHook{std::move(hook)});
}

// The hook keeps the leaf alive.
void Parameter::let_shard_keep_leaf() {
  if (!shard_.defined()) return;
  add_shard_hook([leaf = leaf()](const at::TensorBase&) { return at::TensorBase(); });
  kept_ = c10::weak_intrusive_ptr<at::TensorImpl>(shard_.getIntrusivePtr());
  is_kept_ = true;
  shard_ = at::Tensor();
}

const Parameter::PreHook* Parameter::find_pre_hook(const at::Tensor& leaf) {
  const auto* hook =
      base::find_hook(leaf, [](const base::TensorHook& each) { return each.target<PreHook>() != nullptr; });
  return hook == nullptr ? nullptr : hook->target<PreHook>();
}

void Parameter::add_pre_hook(const std::shared_ptr<void>& owner, const at::Tensor& leaf) {
  base::add_hook(leaf, PreHook(owner, *this));
}

std::shared_ptr<void> Parameter::owner(const at::Tensor& leaf) {
  if (const auto* hook = find_pre_hook(leaf)) return hook->owner_;
  const auto* hook = dynamic_cast<const PostHook*>(autograd::impl::post_acc_grad_hooks(leaf).get());
  return hook == nullptr ? nullptr : hook->owner_;
}

// The slot holds one hook, and a user's later one replaces ours. So we take the slot back before each gradient.
void Parameter::take_post_hook_slot(const std::shared_ptr<void>& owner, const at::Tensor& leaf) {
  auto& slot = autograd::impl::post_acc_grad_hooks(leaf);
  if (dynamic_cast<PostHook*>(slot.get()) != nullptr) return;
  autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<PostHook>(owner, *this, std::move(slot)));
}

void Parameter::set_aside(const std::shared_ptr<void>& owner, bool defined) {
  listener_->gradient_arriving(*this, defined);
  const auto tensor = leaf();
  take_post_hook_slot(owner, tensor);
  if (aside_) return;
  hide_absent_gradient();
  put_aside_ = std::exchange(tensor.mutable_grad(), at::Tensor());
  aside_ = true;
}

void Parameter::collect(const std::shared_ptr<void>& owner, const at::Tensor& leaf) {
  if (!aside_) replace_pre_hook(owner, leaf);
  auto arrived = std::exchange(leaf.mutable_grad(), at::Tensor());
  put_back();
  if (!arrived.defined()) return;
  // No ComputeGuard: autograd must see the front end's operations.
  if (visible_) arrived = visible_->arrived(arrived);
  if (arrived.layout() != at::kStrided) {
    throw Error(c10::str(
        "shardwise: the gradient of '", name(), "' has layout ", arrived.layout(),
        "; only strided gradients can be averaged. Make the layer produce dense gradients (Python: sparse=False; C++: "
        "EmbeddingOptions::sparse(false)), or name its parameters in ignored_parameters."));
  }
  auto& before = listener_->is_inside_another() ? inside_ : fresh_;
  // The graph of a gradient made with create_graph may hold the same memory: never add into that.
  if (arrived.requires_grad() || before.defined()) {
    const base::ComputeGuard guard;
    if (arrived.requires_grad()) arrived = arrived.detach().clone();
    if (before.defined()) arrived = at::add(as_in_sum(before), arrived);
  }
  before = std::move(arrived);
  listener_->gradient_arrived(*this);
}

// The copy into the bucket widens gradients that are narrower than the sum: too late for those that are added up
// before.
at::Tensor Parameter::as_in_sum(const at::Tensor& gradient) const {
  const bool widens = sum_dtype_ && at::isFloatingType(*sum_dtype_) && gradient.is_floating_point() &&
                      c10::elementSize(*sum_dtype_) > gradient.itemsize();
  return widens ? gradient.to(*sum_dtype_) : gradient;
}

// The tensor's hooks were cleared (Python's first register_hook does this). What is in .grad now is from this backward
// alone, unless a gradient was there before: only the pre-hook could have kept the two apart.
void Parameter::replace_pre_hook(const std::shared_ptr<void>& owner, const at::Tensor& leaf) {
  add_pre_hook(owner, leaf);
  listener_->gradient_arriving(*this, true);
  const auto before = published_.lock();
  if (before && (before.get() == leaf.grad().unsafeGetTensorImpl() || leaf.grad().requires_grad())) {
    throw Error(c10::str(
        "shardwise: the hooks of '", name(),
        "' were cleared since the last backward (the first register_hook() in Python does this), and its gradient was "
        "not reset, so old and new gradients cannot be told apart. Register tensor hooks before replicate() or "
        "fully_shard(), or call zero_grad() before this backward."));
  }
}

void Parameter::put_back() {
  if (!aside_) return;
  aside_ = false;
  auto impl = leaf_.lock();
  if (impl) at::Tensor(std::move(impl)).mutable_grad() = std::move(put_aside_);
  put_aside_ = at::Tensor();
}

at::Tensor Parameter::take_local() {
  put_back();
  auto fresh = std::exchange(fresh_, at::Tensor());
  if (!pending_.defined()) return fresh;
  const base::ComputeGuard guard;
  return fresh.defined() ? at::add(pending_, fresh) : pending_;
}

void Parameter::keep_for_later() {
  const base::ComputeGuard guard;
  put_back();
  if (!fresh_.defined()) return;
  if (pending_.defined()) {
    pending_.add_(fresh_);
  } else {
    pending_ = fresh_.to(sum_dtype_.value_or(fresh_.scalar_type()));
  }
  fresh_ = at::Tensor();
  follow_sum_dtype();
}

void Parameter::hide_absent_gradient() const {
  if (!absent_.defined() || leaf_.expired()) return;
  auto& gradient = leaf_._unsafe_get_target()->mutable_grad();
  if (gradient.is_same(absent_)) gradient = at::Tensor();
}

// Not if the leaf wraps another tensor: its gradient would do so too.
void Parameter::show_pending() {
  if (!visible_ || full_.defined() || !pending_.defined() || leaf_.expired()) return;
  leaf().mutable_grad() = pending_;
  shows_pending_ = true;
}

void Parameter::hide_pending() {
  if (std::exchange(shows_pending_, false) && !leaf_.expired()) leaf().mutable_grad() = at::Tensor();
}

void Parameter::take_leaf_gradient() {
  hide_absent_gradient();
  const auto* own = leaf_._unsafe_get_target();
  if (!is_apart() || leaf_.expired() || (!shows_pending_ && !own->grad().defined())) return;
  auto gradient = std::exchange(leaf().mutable_grad(), at::Tensor());
  if (std::exchange(shows_pending_, false)) {
    if (gradient.is_same(pending_)) return;
    pending_ = at::Tensor();
    if (!gradient.defined()) return follow_sum_dtype();
  }
  fresh_ = visible_ ? visible_->arrived(gradient) : gradient;
  keep_for_later();
}

void Parameter::forget_backward() {
  put_back();
  fresh_ = inside_ = at::Tensor();
  hook_due_ = false;
}

int64_t Parameter::version() const {
  if (!visible_) return 0;
  const auto of = [](const at::TensorImpl& tensor) {
    // Tensors made in inference mode have none.
    const auto& counter = tensor.version_counter();
    return counter.enabled() ? static_cast<int64_t>(counter.current_version()) : 0;
  };
  const auto* shard = live_shard();
  return of(*visible_->parameter().unsafeGetTensorImpl()) + of(shard != nullptr ? *shard : live_full());
}

// Copying a handle of a tensor that Python knows takes Python's lock, so this passes the tensor on without a copy.
template <typename Do>
void Parameter::with_visible(const Do& act) const {
  visible_ ? act(visible_->parameter()) : act(stored());
}

void Parameter::publish(const at::Tensor& mean) {
  hook_due_ = true;
  if (visible_ || !is_apart()) {
    return with_visible([&](const at::Tensor& tensor) { add_to(tensor.mutable_grad(), mean); });
  }
  const auto shard = stored();
  const auto changed = run_shard_hooks(shard, mean);
  auto& gradient_of_shard = shard.mutable_grad();
  add_to(gradient_of_shard, changed);
  listener_->gradient_published(gradient_of_shard);
  if (!absent_.defined() || leaf_.expired()) return;
  auto& gradient = leaf_._unsafe_get_target()->mutable_grad();
  if (!gradient.defined()) gradient = absent_;
}

// Autograd runs a tensor's hooks when it brings the gradient. For a shard we do both.
at::Tensor Parameter::run_shard_hooks(const at::Tensor& shard, const at::Tensor& mean) const {
  const auto is_ours = [](const base::TensorHook& hook) { return hook.target<ShardHook>() != nullptr; };
  if (!base::has_hooks(shard, is_ours)) return mean;
  listener_->gradient_published(mean);
  auto changed = base::run_hooks(shard, mean, is_ours);
  if (changed.sizes() == mean.sizes()) return changed;
  throw Error(c10::str(
      "shardwise: a hook on the shard of '", name(), "' changed the sizes of the gradient from ", mean.sizes(), " to ",
      changed.sizes(), ". It must keep the sizes of the shard."));
}

void Parameter::add_to(at::Tensor& grad, const at::Tensor& mean) {
  if (grad.defined()) {
    const base::ComputeGuard guard;
    (visible_ ? visible_->memory(grad) : grad).add_(mean);
  } else {
    grad = visible_ ? visible_->gradient(mean) : mean;
  }
  if (!visible_) published_ = grad.getIntrusivePtr();
}

void Parameter::run_hook() {
  if (!std::exchange(hook_due_, false)) return;
  with_visible([](const at::Tensor& tensor) {
    auto* hook = autograd::impl::post_acc_grad_hooks(tensor).get();
    if (hook == nullptr) return;
    const auto* ours = dynamic_cast<const PostHook*>(hook);
    auto* users = ours == nullptr ? hook : ours->users_.get();
    if (users != nullptr) (*users)(tensor);
  });
}

} // namespace shardwise::group
