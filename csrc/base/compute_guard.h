#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/AutogradState.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace shardwise::base {

/// The dispatch key of tensors whose use a front end must learn of; nn/touch/touch.h explains it.
inline constexpr c10::DispatchKey kTouchKey = c10::DispatchKey::DeferredInit;

/// Put around all tensor work of ours: autograd, autocast and the touch trigger ignore it, and what it makes is an
/// ordinary tensor even if the caller is in inference mode. Views made under it are not views to autograd.
class ComputeGuard {
 public:
  // Does what InferenceMode(false), AutoGradMode(false) and three guards of dispatch keys do, at a third of their cost.
  ComputeGuard() : autograd_(c10::AutogradState::get_tls_state()), keys_(c10::impl::tls_local_dispatch_key_set()) {
    c10::AutogradState::set_tls_state(
        {/*grad_mode=*/false, /*inference_mode=*/false, /*fw_grad_mode=*/true,
         /*multithreading_enabled=*/true});
    auto keys = keys_;
    keys.included_ = keys.included_.add(c10::DispatchKey::ADInplaceOrView);
    keys.excluded_ = keys.excluded_ | kUnseen;
    c10::impl::_force_tls_local_dispatch_key_set(keys);
  }
  ComputeGuard(const ComputeGuard&) = delete;
  ComputeGuard& operator=(const ComputeGuard&) = delete;
  ~ComputeGuard() {
    c10::AutogradState::set_tls_state(autograd_);
    c10::impl::_force_tls_local_dispatch_key_set(keys_);
  }

 private:
  // Also torch.func's transforms: the engine's tensors are none of theirs.
  static constexpr c10::DispatchKeySet kUnseen = c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                                 c10::autocast_dispatch_keyset |
                                                 c10::DispatchKeySet(
                                                     {kTouchKey, c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                                      c10::DispatchKey::FuncTorchDynamicLayerBackMode});

  c10::AutogradState autograd_;
  c10::impl::LocalDispatchKeySet keys_;
};

/// What this function computes, under the guard.
template <typename Compute>
auto guarded(const Compute& compute) {
  const ComputeGuard guard;
  return compute();
}

} // namespace shardwise::base
