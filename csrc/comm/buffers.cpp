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
    const auto& storage = idle_[i].memory.storage();
    const bool serves = storage.device() == options.device();
    return serves ? std::optional(std::pair(storage.nbytes(), storage.data())) : std::nullopt;
  };
  {
    const std::lock_guard lock(mutex_);
    const auto choice = choose_idle(idle_.size(), bytes, rank);
    if (choice.serves) {
      auto idle = remove(*choice.serves);
      idle.last_use.await(idle.memory);
      spare_.push_back(std::move(idle.last_use));
      return view(idle.memory);
    }
    if (choice.gives_way) {
      const auto idle = remove(*choice.gives_way);
      idle.last_use.tell_allocator(idle.memory);
    }
  }
  ++counters.allocations;
  return view(transport::shared_zeros(static_cast<int64_t>(bytes), options.dtype(at::kByte)));
}

Buffers::Idle Buffers::remove(size_t index) {
  auto idle = std::move(idle_[index]);
  idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(index));
  return idle;
}

void Buffers::free_idle() {
  const std::lock_guard lock(mutex_);
  for (const auto& [memory, last_use] : idle_) last_use.tell_allocator(memory);
  idle_.clear();
}

void Buffers::give(const at::Tensor& buffer) {
  if (buffer.defined()) give(buffer, note(buffer));
}

LastUse Buffers::note(const at::Tensor& buffer) {
  LastUse last_use;
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      last_use = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  last_use.note(buffer);
  return last_use;
}

void Buffers::give(const at::Tensor& buffer, LastUse last_use) {
  const std::lock_guard lock(mutex_);
  idle_.push_back({buffer, std::move(last_use)});
}

} // namespace shardwise::comm
