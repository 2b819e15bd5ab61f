#include "transport/shared_memory.h"

#include "base/forked.h"
#include "transport/same_host/arena.h"

#include <shardwise/shared_memory.h>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <mutex>
#include <utility>

namespace shardwise {
namespace {

/// Never destroyed: tensors may outlive any static object.
struct Listener {
  std::mutex mutex;
  std::function<void(int64_t)> call;

  static Listener& get() {
    static auto* value = new Listener;
    return *value;
  }
};

void tell(void* memory, int64_t bytes) {
  c10::reportMemoryUsageToProfiler(memory, bytes, 0, 0, c10::Device(c10::DeviceType::CPU));
  auto& listener = Listener::get();
  const std::lock_guard lock(listener.mutex);
  if (listener.call) listener.call(bytes);
}

} // namespace

void set_shared_memory_listener(std::function<void(int64_t bytes)> listener) {
  auto& current = Listener::get();
  const std::lock_guard lock(current.mutex);
  current.call = std::move(listener);
}

namespace transport {
namespace {

/// A piece of the arena. It keeps the arena alive.
struct Piece {
  std::shared_ptr<same_host::Arena> arena;
  std::byte* memory;
  size_t bytes;
  std::unique_ptr<base::InForkedChild> in_child = nullptr;

  static void free(void* context) {
    const auto* piece = static_cast<Piece*>(context);
    piece->arena->give(piece->memory, piece->bytes);
    tell(piece->memory, -static_cast<int64_t>(piece->bytes));
    delete piece;
  }
};

/// Allocates zeroed memory from the arena; ordinary memory if there is no room.
class SharedAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    auto arena = bytes > 0 ? same_host::Arena::in_use() : nullptr;
    auto* memory = arena ? arena->take(bytes) : nullptr;
    if (memory == nullptr) {
      auto ordinary = c10::GetCPUAllocator()->allocate(bytes);
      if (bytes > 0) std::memset(ordinary.get(), 0, bytes);
      return ordinary;
    }
    tell(memory, static_cast<int64_t>(bytes));
    return {memory, new Piece{std::move(arena), memory, bytes}, &Piece::free, at::kCPU};
  }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

} // namespace

at::Tensor shared_zeros(int64_t numel, const at::TensorOptions& options) {
  const bool plain = options.device().is_cpu() && options.layout() == at::kStrided && !options.pinned_memory();
  if (!plain || !same_host::Arena::in_use()) return at::zeros({numel}, options);
  static auto* allocator = new SharedAllocator;
  auto tensor = at::detail::empty_generic(
      {numel}, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), c10::typeMetaToScalarType(options.dtype()),
      std::nullopt);
  if (is_shared(tensor)) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto* piece = static_cast<Piece*>(storage->data_ptr().get_context());
    piece->in_child = std::make_unique<base::InForkedChild>([storage] { refuse_in_child(*storage); });
  }
  return tensor;
}

bool is_shared(const at::TensorBase& tensor) {
  return tensor.storage().data_ptr().get_deleter() == &Piece::free;
}

void refuse_in_child(c10::StorageImpl& storage) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
      "shardwise: this process was forked from a rank, and this tensor (a shard, gradient or full copy of a parameter) "
      "lies in memory that only ranks share. Clone it before the fork, start the process with spawn or forkserver, or "
      "set SHARDWISE_SHARED_MEMORY=off.");
}

} // namespace transport
} // namespace shardwise
