#include "transport/shared_memory.h"

#include "base/forked.h"
#include "transport/same_host/arena.h"

#include <shardwise/shared_memory.h>

#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <utility>

namespace shardwise {
namespace {

/// Never destroyed: tensors may outlive any static object.
struct Listener {
  std::atomic<bool> is_there = false;
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
  if (!listener.is_there) return;
  const std::lock_guard lock(listener.mutex);
  if (listener.call) listener.call(bytes);
}

} // namespace

void set_shared_memory_listener(std::function<void(int64_t bytes)> listener) {
  auto& current = Listener::get();
  const std::lock_guard lock(current.mutex);
  current.call = std::move(listener);
  current.is_there = static_cast<bool>(current.call);
}

namespace transport {
namespace {

/// A piece of an arena. It keeps the arena alive.
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

/// Null if there is no room.
at::DataPtr take_piece(size_t bytes) {
  auto arena = bytes > 0 ? same_host::Arena::in_use() : nullptr;
  auto* memory = arena ? arena->take(bytes) : nullptr;
  if (memory == nullptr) return {};
  tell(memory, static_cast<int64_t>(bytes));
  return {memory, new Piece{std::move(arena), memory, bytes}, &Piece::free, at::kCPU};
}

/// Null for other memory, also for what a forked child may not use.
Piece* piece_of(c10::StorageImpl& storage) {
  const auto& data = storage._mutable_data_ptr_no_checks();
  return data.get_deleter() == &Piece::free ? static_cast<Piece*>(data.get_context()) : nullptr;
}

void refuse_in_children(c10::StorageImpl& storage) {
  auto* piece = piece_of(storage);
  if (piece == nullptr || piece->arena->is_private()) return;
  piece->in_child = std::make_unique<base::InForkedChild>([&storage] { refuse_in_child(storage); });
}

/// Allocates memory from the arena; ordinary memory if there is no room.
class ArenaAllocator final : public c10::Allocator {
 public:
  static ArenaAllocator* get() {
    static auto* value = new ArenaAllocator;
    return value;
  }
  at::DataPtr allocate(size_t bytes) override {
    auto data = take_piece(bytes);
    return data || bytes == 0 ? std::move(data) : c10::GetCPUAllocator()->allocate(bytes);
  }
  void copy_data(void* destination, const void* source, std::size_t count) const override {
    default_copy_data(destination, source, count);
  }
};

bool is_plain(const at::TensorOptions& options) {
  return options.device().is_cpu() && options.layout() == at::kStrided && !options.pinned_memory();
}

} // namespace

at::Tensor arena_memory(int64_t numel, const at::TensorOptions& options) {
  if (!is_plain(options)) return {};
  const auto bytes = static_cast<size_t>(numel) * options.dtype().itemsize();
  auto data = take_piece(bytes);
  if (!data) return {};
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, std::move(data), ArenaAllocator::get(), /*resizable=*/true);
  refuse_in_children(*storage);
  // Avoids the dispatcher, because this runs for every collective.
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(options.computeDispatchKey()), options.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return tensor;
}

at::Tensor shared_zeros(int64_t numel, const at::TensorOptions& options) {
  auto tensor = arena_memory(numel, options);
  if (!tensor.defined()) return at::zeros({numel}, options);
  std::memset(tensor.mutable_data_ptr(), 0, tensor.nbytes());
  return tensor;
}

bool is_in_arena(const at::TensorBase& tensor) {
  return piece_of(*tensor.storage().unsafeGetStorageImpl()) != nullptr;
}

bool is_shared(const at::TensorBase& tensor) {
  const auto* piece = piece_of(*tensor.storage().unsafeGetStorageImpl());
  return piece != nullptr && !piece->arena->is_private();
}

void free_in_arena(c10::StorageImpl& storage) {
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, at::kCPU));
}

void refill_in_arena(c10::StorageImpl& storage) {
  storage.set_data_ptr_noswap(ArenaAllocator::get()->allocate(storage.nbytes()));
  refuse_in_children(storage);
}

void trim_arena() {
  same_host::Arena::trim();
}

void refuse_in_child(c10::StorageImpl& storage) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
      "shardwise: this process was forked from a rank, and this tensor (a shard, gradient or full copy of a parameter) "
      "lies in memory that only ranks share. Clone it before the fork, start the process with spawn or forkserver, or "
      "set SHARDWISE_SHARED_MEMORY=off.");
}

} // namespace transport
} // namespace shardwise
