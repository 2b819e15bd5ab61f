#include "memory.h"

#include "device.h"
#include "faults.h"

#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <cstring>

namespace late {
namespace {

constexpr size_t kDeviceBytes = size_t{4} << 30;
constexpr size_t kBlock = 512;

uintptr_t reserve(int protection) {
  void* place = mmap(nullptr, kDevices * kDeviceBytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(place != MAP_FAILED, "late device: no address space is left");
  return reinterpret_cast<uintptr_t>(place);
}

/// The program's addresses, where nothing can be read, and the same bytes for the workers.
struct Spaces {
  uintptr_t program = reserve(PROT_NONE);
  uintptr_t workers = reserve(PROT_READ | PROT_WRITE);
};

const Spaces& spaces() {
  static const Spaces all;
  return all;
}

} // namespace

bool is_device_memory(uintptr_t address) {
  return address - spaces().program < kDevices * kDeviceBytes;
}

int device_of(uintptr_t address) {
  return static_cast<int>((address - spaces().program) / kDeviceBytes);
}

uintptr_t for_worker_in_device(uintptr_t address) {
  return address - spaces().program + spaces().workers;
}

void poison(uintptr_t begin, size_t size) {
  std::memset(reinterpret_cast<void*>(for_worker_in_device(begin)), 0xff, size);
}

Memory::Memory(int device) : device_(device), next_(spaces().program + static_cast<size_t>(device) * kDeviceBytes) {}

Block& Memory::take(size_t size, c10::StreamId stream) {
  size = (size + kBlock - 1) / kBlock * kBlock;
  used_ += size;
  peak_ = std::max(peak_, used_);
  auto& free = free_[{stream, size}];
  if (!free.empty()) {
    auto& block = *free.back();
    free.pop_back();
    return block;
  }
  Capturing::forbid(device_, "take memory from the system");
  const auto begin = next_;
  next_ += size;
  TORCH_CHECK(
      next_ <= spaces().program + static_cast<size_t>(device_ + 1) * kDeviceBytes, "late device: device ", device_,
      " is out of memory");
  poison(begin, size);
  const Block block{.number = blocks_.size(), .begin = begin, .size = size, .owner = stream, .history = History(size)};
  return blocks_.emplace(begin, block).first->second;
}

void Memory::give(Block& block) {
  used_ -= block.size;
  free_[{block.owner, block.size}].push_back(&block);
}

Block& Memory::at(uintptr_t address) {
  const auto next = blocks_.upper_bound(address);
  TORCH_CHECK(
      next != blocks_.begin() && address < std::prev(next)->second.begin + std::prev(next)->second.size,
      "late device: device ", device_, " has nothing at this address; perhaps it is another device's");
  return std::prev(next)->second;
}

} // namespace late
