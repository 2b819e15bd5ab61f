#pragma once

#include <shardwise/counters.h>
#include <shardwise/export.h>

#include <ATen/core/Tensor.h>

#include <mutex>
#include <vector>

namespace shardwise::comm {

/// Memory for full parameters and for collectives, kept for reuse: after the first step or two nothing is allocated.
/// Thread safe.
class SHARDWISE_API Buffers {
 public:
  /// A vector of `numel` elements with arbitrary content (zeros if newly allocated). Counts an allocation if there is
  /// one.
  at::Tensor take(int64_t numel, const at::TensorOptions& options, Counters& counters);
  /// Gives back a vector; the caller must not use it any more.
  void give(const at::Tensor& buffer);
  void free_idle();

 private:
  std::mutex mutex_;
  /// Byte tensors that are not in use.
  std::vector<at::Tensor> idle_;
};

} // namespace shardwise::comm
