#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace shardwise::group {

/// The key that tensors carry whose use a front end must learn of; nn/touch.h says how it works.
inline constexpr c10::DispatchKey kTouchKey = c10::DispatchKey::DeferredInit;

/// Around all tensor work of ours: autograd, autocast and the touch trigger do not see it, and what it makes is an
/// ordinary tensor even when the caller is in inference mode. Views made under it are not views to autograd.
class ComputeGuard {
 private:
  c10::InferenceMode no_inference_{false};
  c10::AutoGradMode no_grad_{false};
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_touch_{kTouchKey};
};

} // namespace shardwise::group
