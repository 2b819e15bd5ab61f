#include "comm/buffers.h"

#include "comm/idle_choice.h"
#include "transport/transport.h"

#include <utility>

namespace shardwise::comm {

at::Tensor Buffers::take(int64_t numel, const at::TensorOptions& options, Counters& counters) {
  const auto bytes = static_cast<size_t>(numel) * options.dtype().itemsize();
  // Avoids the dispatcher, because this runs for every collective.
  const auto view = [&](const at::Tensor& memory) {
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(memory.storage()), c10::DispatchKeySet(options.computeDispatchKey()), options.dtype());
    result.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
    return result;
  };
  const auto rank = [&](size_t i) {
    const auto& storage = idle_[i].storage();
    const bool serves = storage.device() == options.device();
    return serves ? std::optional(std::pair(storage.nbytes(), storage.data())) : std::nullopt;
  };
  {
    const std::lock_guard lock(mutex_);
    const auto choice = choose_idle(idle_.size(), bytes, rank);
    const auto place = [&](size_t i) { return idle_.begin() + static_cast<std::ptrdiff_t>(i); };
    if (choice.serves) {
      const auto memory = std::move(idle_[*choice.serves]);
      idle_.erase(place(*choice.serves));
      return view(memory);
    }
    if (choice.gives_way) idle_.erase(place(*choice.gives_way));
  }
  ++counters.allocations;
  return view(transport::shared_zeros(static_cast<int64_t>(bytes), options.dtype(at::kByte)));
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
