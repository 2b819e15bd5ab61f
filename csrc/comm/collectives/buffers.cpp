#include "comm/collectives/buffers.h"

#include "comm/collectives/collectives.h"
#include "comm/collectives/idle_choice.h"
#include "transport/transport.h"

#include <algorithm>

namespace shardwise::comm {

at::Tensor Buffers::take(
    int64_t numel, const at::TensorOptions& options, Counters& counters, const Collectives* owner) {
  if (owner == nullptr) {
    if (auto memory = transport::arena_memory(numel, options); memory.defined()) return memory;
  }
  const auto* identity = owner != nullptr ? owner->identity() : nullptr;
  const auto bytes = static_cast<size_t>(numel) * options.dtype().itemsize();
  // Avoids the dispatcher, because this runs for every collective.
  const auto view = [&](const at::Tensor& memory) {
    auto result = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(memory.storage()), c10::DispatchKeySet(options.computeDispatchKey()), options.dtype());
    result.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
    return result;
  };
  const bool capturing = comm::is_captured(options.device());
  const auto rank = [&](size_t i) {
    const auto& storage = idle_[i].memory.storage();
    const bool serves =
        storage.device() == options.device() && idle_[i].owner == identity && (capturing || !idle_[i].captured);
    return serves ? std::optional(std::pair(storage.nbytes(), storage.data())) : std::nullopt;
  };
  {
    const std::lock_guard lock(mutex_);
    const auto choice = choose_idle(idle_.size(), bytes, rank);
    if (choice.serves) {
      auto idle = remove(*choice.serves);
      idle.last_use.await(idle.memory);
      spare_.push_back(std::move(idle.last_use));
      if (capturing) keep_for_captures(idle.memory);
      return view(idle.memory);
    }
    if (choice.gives_way && !idle_[*choice.gives_way].captured) forget(remove(*choice.gives_way));
  }
  ++counters.allocations;
  const auto memory = owner != nullptr ? owner->allocate(static_cast<int64_t>(bytes), options.device())
                                       : at::zeros({static_cast<int64_t>(bytes)}, options.dtype(at::kByte));
  if (owner != nullptr || capturing) {
    const std::lock_guard lock(mutex_);
    if (owner != nullptr) owners_.emplace_back(memory.storage().unsafeGetStorageImpl(), identity);
    if (capturing) keep_for_captures(memory);
  }
  return view(memory);
}

Buffers::Idle Buffers::remove(size_t index) {
  auto idle = std::move(idle_[index]);
  idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(index));
  return idle;
}

Buffers::~Buffers() {
  free_those([](const Idle&) { return true; });
  transport::trim_arena();
}

void Buffers::free_idle() {
  free_those([](const Idle& idle) { return !idle.captured; });
  transport::trim_arena();
}

template <typename Which>
void Buffers::free_those(const Which& which) {
  const std::lock_guard lock(mutex_);
  for (const auto& idle : idle_) {
    if (which(idle)) forget(idle);
  }
  std::erase_if(idle_, which);
}

void Buffers::forget(const Idle& idle) {
  idle.last_use.tell_allocator(idle.memory);
  if (idle.owner == nullptr) return;
  const auto* storage = idle.memory.storage().unsafeGetStorageImpl();
  std::erase_if(owners_, [&](const auto& each) { return each.first == storage; });
}

const void* Buffers::owner_of(const at::Tensor& buffer) const {
  const auto* storage = buffer.storage().unsafeGetStorageImpl();
  for (const auto& [known, owner] : owners_) {
    if (known == storage) return owner;
  }
  return nullptr;
}

void Buffers::use(const at::Tensor& buffer) {
  if (!comm::is_captured(buffer.device())) return;
  const std::lock_guard lock(mutex_);
  keep_for_captures(buffer);
}

void Buffers::give(const at::Tensor& buffer) {
  if (buffer.defined() && !transport::is_in_arena(buffer)) give(buffer, note(buffer));
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
  if (transport::is_in_arena(buffer)) return;
  const std::lock_guard lock(mutex_);
  if (last_use.captured()) keep_for_captures(buffer);
  idle_.push_back({buffer, std::move(last_use), owner_of(buffer), is_captured(buffer)});
}

void Buffers::keep_for_captures(const at::Tensor& buffer) {
  if (!is_captured(buffer)) captured_.push_back(buffer.storage().unsafeGetStorageImpl());
}

bool Buffers::is_captured(const at::Tensor& buffer) const {
  return std::find(captured_.begin(), captured_.end(), buffer.storage().unsafeGetStorageImpl()) != captured_.end();
}

} // namespace shardwise::comm
