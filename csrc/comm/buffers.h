#pragma once

#include <shardwise/counters.h>
#include <shardwise/export.h>

#include <ATen/core/Tensor.h>

#include <mutex>
#include <vector>

namespace shardwise::comm {

/// Memory of full parameters, and what collectives read and write, kept for the next one: after the first step or two
/// nothing is allocated. Thread safe.
class SHARDWISE_API Buffers {
 public:
  /// A vector of that many elements with any content (zeros where it is new). Counts an allocation when there is one.
  at::Tensor take(int64_t numel, const at::TensorOptions& options, Counters& counters);
  /// The vector is of no use to the caller from now on.
  void give(const at::Tensor& buffer);
  void free_idle();

 private:
  std::mutex mutex_;
  /// Bytes that nobody uses.
  std::vector<at::Tensor> idle_;
};

} // namespace shardwise::comm
