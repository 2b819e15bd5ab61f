#include "comm/buffers.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

namespace shardwise::comm {

// The smallest that is large enough, the first in memory of several: a step then finds what the one before had. When
// none is, the largest gives way to a larger one: what is kept tends to the number of buffers in use at a time, each as
// large as the largest request.
at::Tensor Buffers::take(int64_t numel, const at::TensorOptions& options, Counters& counters) {
  const auto bytes = static_cast<size_t>(numel) * options.dtype().itemsize();
  // Without the dispatcher: this happens for every collective.
  const auto view = [&](const at::Tensor& memory) {
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(memory.storage()), c10::DispatchKeySet(options.computeDispatchKey()), options.dtype());
    result.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
    return result;
  };
  const auto size = [](const at::Tensor& memory) { return memory.storage().nbytes(); };
  const auto rank = [&](const at::Tensor& memory) { return std::pair(size(memory), memory.storage().data()); };
  {
    const std::lock_guard lock(mutex_);
    auto best = idle_.end();
    auto largest = idle_.end();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      if (it->device() != options.device()) continue;
      if (size(*it) >= bytes && (best == idle_.end() || rank(*it) < rank(*best))) best = it;
      if (largest == idle_.end() || size(*it) > size(*largest)) largest = it;
    }
    if (best != idle_.end()) {
      const auto memory = std::move(*best);
      idle_.erase(best);
      return view(memory);
    }
    if (largest != idle_.end()) idle_.erase(largest);
  }
  ++counters.allocations;
  return view(at::zeros({static_cast<int64_t>(bytes)}, options.dtype(at::kByte)));
}

void Buffers::free_idle() {
  const std::lock_guard lock(mutex_);
  idle_.clear();
}

void Buffers::give(const at::Tensor& buffer) {
  if (!buffer.defined()) return;
  const std::lock_guard lock(mutex_);
  idle_.push_back(buffer);
}

} // namespace shardwise::comm
