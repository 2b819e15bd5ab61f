#include "comm/buffers.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace shardwise::comm {

// The smallest that is large enough. When none is, the largest gives way to a larger one: what is kept tends to the
// number of buffers in use at a time, each as large as the largest request.
at::Tensor Buffers::take(int64_t numel, const at::TensorOptions& options, Counters& counters) {
  const auto bytes = numel * static_cast<int64_t>(options.dtype().itemsize());
  const auto view = [&](const at::Tensor& memory) {
    auto result = at::empty({0}, options);
    return result.set_(memory.storage(), 0, {numel}, {1});
  };
  {
    const std::lock_guard lock(mutex_);
    auto best = idle_.end();
    auto largest = idle_.end();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      if (it->device() != options.device()) continue;
      if (it->numel() >= bytes && (best == idle_.end() || it->numel() < best->numel())) best = it;
      if (largest == idle_.end() || it->numel() > largest->numel()) largest = it;
    }
    if (best != idle_.end()) {
      const auto memory = std::move(*best);
      idle_.erase(best);
      return view(memory);
    }
    if (largest != idle_.end()) idle_.erase(largest);
  }
  ++counters.allocations;
  return view(at::zeros({bytes}, options.dtype(at::kByte)));
}

void Buffers::give(const at::Tensor& buffer) {
  if (!buffer.defined()) return;
  auto memory = at::empty({0}, buffer.options().dtype(at::kByte));
  memory.set_(buffer.storage(), 0, {static_cast<int64_t>(buffer.storage().nbytes())}, {1});
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(memory));
}

} // namespace shardwise::comm
