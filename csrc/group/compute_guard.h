#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

namespace shardwise::group {

/// Around all tensor work of ours: autograd does not see it, and what it makes is an ordinary tensor even when the
/// caller is in inference mode. Views made under it are not views to autograd.
class ComputeGuard {
 private:
  c10::InferenceMode no_inference_{false};
  c10::AutoGradMode no_grad_{false};
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
};

} // namespace shardwise::group
