#include "pinned.h"

#include "memory.h"

#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace late {
namespace {

/// The pages twice: for the host, and for the workers of devices.
struct Pinned {
  uintptr_t host;
  uintptr_t workers;
  size_t size;
  History history;
  /// Copies that the host has not waited for.
  struct Copy {
    int device;
    Operation operation;
    bool writes;
  };
  std::vector<Copy> copies = {};
  bool free = false;

  void protect() const {
    int allowed = PROT_READ | PROT_WRITE;
    for (const auto& copy : copies) allowed &= copy.writes ? PROT_NONE : PROT_READ;
    mprotect(reinterpret_cast<void*>(host), size, allowed);
  }
};

std::mutex mutex;

std::map<uintptr_t, Pinned>& all() {
  static auto* const pinned = new std::map<uintptr_t, Pinned>;
  return *pinned;
}

Pinned* find(uintptr_t address) {
  const auto next = all().upper_bound(address);
  if (next == all().begin()) return nullptr;
  auto& pinned = std::prev(next)->second;
  return address < pinned.host + pinned.size ? &pinned : nullptr;
}

uintptr_t map(int file, size_t size) {
  void* place = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  TORCH_CHECK(place != MAP_FAILED, "late device: no memory to pin");
  return reinterpret_cast<uintptr_t>(place);
}

uintptr_t take(size_t size) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size = std::max(page, (size + page - 1) / page * page);
  const std::lock_guard lock(mutex);
  for (auto& [address, pinned] : all()) {
    if (!pinned.free || pinned.size != size || !pinned.copies.empty()) continue;
    pinned.free = false;
    pinned.history.forget();
    return address;
  }
  const int file = memfd_create("late device", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0, "late device: no memory to pin");
  const Pinned pinned{.host = map(file, size), .workers = map(file, size), .size = size, .history = History(size)};
  close(file);
  return all().emplace(pinned.host, pinned).first->first;
}

void give(void* place) {
  const std::lock_guard lock(mutex);
  find(reinterpret_cast<uintptr_t>(place))->free = true;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* place = reinterpret_cast<void*>(take(size));
    return {place, place, &give, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give;
  }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }
};

/// The last words of a process whose host touched what it may not.
void tell_what_was_touched(int signal, siginfo_t* info, void* /*context*/) {
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (is_device_memory(address)) {
    std::fprintf(stderr, "late device: the host touched memory of a device: copy it to the CPU first.\n");
  } else if (const auto* pinned = find(address)) {
    for (const auto& copy : pinned->copies) {
      std::fprintf(
          stderr, "late device: the host touched pinned memory that '%s' of device %d still %s: wait for it first.\n",
          copy.operation.name, copy.device, copy.writes ? "writes" : "reads");
    }
  }
  std::signal(signal, SIG_DFL);
}

} // namespace

c10::Allocator* pinned_allocator() {
  static auto* const allocator = new Allocator;
  return allocator;
}

void watch_the_host() {
  struct sigaction action = {};
  action.sa_sigaction = &tell_what_was_touched;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
}

bool is_pinned(uintptr_t address) {
  const std::lock_guard lock(mutex);
  return find(address) != nullptr;
}

uintptr_t for_worker_in_pinned(uintptr_t address) {
  const std::lock_guard lock(mutex);
  const auto* pinned = find(address);
  return pinned == nullptr ? address : address - pinned->host + pinned->workers;
}

std::optional<History::Conflict> use_pinned(
    uintptr_t begin, uintptr_t end, bool writes, int device, const Operation& operation, const Clock& clock) {
  const std::lock_guard lock(mutex);
  auto* pinned = find(begin);
  if (pinned == nullptr) return std::nullopt;
  pinned->copies.push_back({device, operation, writes});
  pinned->protect();
  return pinned->history.access(begin - pinned->host, end - pinned->host, writes, operation, clock);
}

void release_pinned(int device, const Clock& clock) {
  const std::lock_guard lock(mutex);
  for (auto& [address, pinned] : all()) {
    const auto done = std::erase_if(
        pinned.copies, [&](const auto& copy) { return copy.device == device && clock.covers(copy.operation.moment); });
    if (done > 0) pinned.protect();
  }
}

} // namespace late
