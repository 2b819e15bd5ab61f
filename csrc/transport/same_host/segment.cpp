#include "transport/same_host/segment.h"

#include "base/host.h"
#include "base/weak_table.h"

#include <c10/util/StringUtil.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

namespace shardwise::transport::same_host {
namespace {

/// The system kills a process whose file grows beyond this limit.
bool may_be_as_large_as(size_t bytes) {
  rlimit limit{};
  return getrlimit(RLIMIT_FSIZE, &limit) == 0 && (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= bytes);
}

constexpr int kShared = MAP_SHARED | MAP_NORESERVE;
constexpr int kPrivate = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

Mapped map(int file, size_t bytes, int protection, int kind = kShared) {
  auto* memory = mmap(nullptr, bytes, protection, kind, file, 0);
  return {memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory), {bytes}};
}

base::WeakTable<uint64_t, PeerProcess>& known() {
  static auto* table = new base::WeakTable<uint64_t, PeerProcess>;
  return *table;
}

} // namespace

void Unmap::operator()(std::byte* memory) const {
  munmap(memory, bytes);
}

std::optional<Segment> Segment::make(size_t bytes) {
  Segment segment;
  auto& [process, file, mark, size] = segment.address_;
  process = getpid();
  size = bytes;
  if (!may_be_as_large_as(bytes) || getrandom(&mark, sizeof mark, 0) != sizeof mark) return std::nullopt;
  const int opened = memfd_create("shardwise", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  segment.file_ = base::Descriptor(opened);
  file = opened;
  if (opened < 0 || ftruncate(opened, static_cast<off_t>(bytes)) != 0) return std::nullopt;
  // A process that opens the file must not be able to truncate what ranks read.
  if (fcntl(opened, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return std::nullopt;
  segment.memory_ = map(opened, bytes, PROT_READ | PROT_WRITE);
  if (!segment.memory_) return std::nullopt;
  std::memcpy(segment.begin(), &mark, sizeof mark);
  // Otherwise parent and child would see each other's writes.
  segment.in_child_ = std::make_unique<base::InForkedChild>([memory = segment.begin(), bytes] {
    constexpr auto kNothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(memory, bytes, PROT_NONE, kNothing, -1, 0) == MAP_FAILED) std::abort();
  });
  return segment;
}

std::optional<Segment> Segment::make_private(size_t bytes) {
  Segment segment;
  segment.address_ = {.process = getpid(), .bytes = bytes};
  segment.memory_ = map(-1, bytes, PROT_READ | PROT_WRITE, kPrivate);
  if (!segment.memory_) return std::nullopt;
  return segment;
}

std::optional<SegmentView> SegmentView::open(const Segment::Address& address) {
  const auto path = c10::str("/proc/", address.process, "/fd/", address.file);
  // Its type is known only once it is open; O_NONBLOCK, because opening a pipe would wait for the other end.
  const base::Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat facts {};
  const bool fits = fstat(file.get(), &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_size >= 0 &&
                    static_cast<uint64_t>(facts.st_size) == address.bytes;
  auto memory = fits ? map(file.get(), address.bytes, PROT_READ) : Mapped();
  if (!memory || std::memcmp(memory.get(), &address.mark, sizeof address.mark) != 0) return std::nullopt;
  return SegmentView(std::move(memory));
}

std::shared_ptr<PeerProcess> PeerProcess::of(const Segment::Address& arena) {
  return known().find_or_make(arena.mark, [&]() -> std::shared_ptr<PeerProcess> {
    // The process is opened before its memory: if the number had been reused by another process, the arena's mark would
    // be missing there.
    auto process = base::watch_process(arena.process);
    auto view = process.get() < 0 ? std::nullopt : SegmentView::open(arena);
    if (!view) return nullptr;
    return std::make_shared<PeerProcess>(PeerProcess{std::move(process), *std::move(view)});
  });
}

bool PeerProcess::alive() const {
  return !base::process_ended(watched);
}

} // namespace shardwise::transport::same_host
