#include "transport/same_host/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace shardwise::transport::same_host {
namespace {

size_t page() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t whole_pages(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + page() - 1) / page() * page();
}

/// Never destroyed: tensors may outlive any static object.
struct Current {
  std::mutex mutex;
  std::weak_ptr<Arena> shared;
  std::shared_ptr<Arena> own;
};

size_t bytes_of_host() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page();
}

std::shared_ptr<Arena> if_of_this_process(const std::shared_ptr<Arena>& arena) {
  return arena && arena->is_of_this_process() ? arena : nullptr;
}

Current& current() {
  static auto* value = new Current;
  return *value;
}

} // namespace

std::shared_ptr<Arena> Arena::in_use() {
  auto& now = current();
  const std::lock_guard lock(now.mutex);
  if (auto shared = if_of_this_process(now.shared.lock())) return shared;
  if (!if_of_this_process(now.own)) {
    auto segment = Segment::make_private(bytes_of_host());
    now.own.reset(segment ? new Arena(*std::move(segment)) : nullptr);
  }
  return now.own;
}

std::shared_ptr<Arena> Arena::of_this_process() {
  auto& now = current();
  const std::lock_guard lock(now.mutex);
  if (auto arena = if_of_this_process(now.shared.lock())) return arena;
  auto segment = Segment::make(bytes_of_host());
  if (!segment) return nullptr;
  std::shared_ptr<Arena> arena(new Arena(*std::move(segment)));
  now.shared = arena;
  return arena;
}

Arena::Arena(Segment segment) : segment_(std::move(segment)) {
  const auto begin = whole_pages(Segment::kMark);
  free_[begin] = segment_.bytes() - begin;
}

bool Arena::holds(const void* memory, size_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(memory);
  return begin >= segment_.begin() && begin + bytes <= segment_.begin() + segment_.bytes();
}

// The highest piece that is large enough gives its end, so that most entries stay where they are.
std::byte* Arena::take(size_t bytes) {
  const auto size = whole_pages(bytes);
  const std::lock_guard lock(mutex_);
  for (auto range = free_.end(); range != free_.begin();) {
    --range;
    if (range->second < size) continue;
    range->second -= size;
    auto* memory = segment_.begin() + range->first + range->second;
    if (range->second == 0) free_.erase(range);
    return memory;
  }
  return nullptr;
}

void Arena::give(std::byte* memory, size_t bytes) {
  // In a forked child the lock may be held for ever.
  if (!is_of_this_process()) return;
  const auto size = whole_pages(bytes);
  const auto begin = offset(memory);
  const std::lock_guard lock(mutex_);
  const auto next = free_.lower_bound(begin);
  const bool joins_next = next != free_.end() && begin + size == next->first;
  const auto before = next == free_.begin() ? free_.end() : std::prev(next);
  if (before != free_.end() && before->first + before->second == begin) {
    before->second += size;
    if (!joins_next) return;
    before->second += next->second;
    free_.erase(next);
  } else if (joins_next) {
    auto node = free_.extract(next);
    node.key() = begin;
    node.mapped() += size;
    free_.insert(std::move(node));
  } else {
    free_.emplace(begin, size);
  }
}

void Arena::trim() {
  auto& now = current();
  const std::lock_guard lock(now.mutex);
  for (const auto& arena : {if_of_this_process(now.shared.lock()), if_of_this_process(now.own)}) {
    if (arena) arena->return_free();
  }
}

void Arena::return_free() {
  const std::lock_guard lock(mutex_);
  const int advice = is_private() ? MADV_DONTNEED : MADV_REMOVE;
  for (const auto& [begin, size] : free_) madvise(segment_.begin() + begin, size, advice);
}

} // namespace shardwise::transport::same_host
