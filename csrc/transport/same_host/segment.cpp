#include "transport/same_host/segment.h"

#include "base/weak_table.h"

#include <c10/util/StringUtil.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <utility>

// Headers of older systems lack it.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace shardwise::transport::same_host {
namespace {

/// The system kills a process whose file grows beyond this limit.
bool may_be_as_large_as(size_t bytes) {
  rlimit limit{};
  return getrlimit(RLIMIT_FSIZE, &limit) == 0 && (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= bytes);
}

constexpr int kShared = MAP_SHARED | MAP_NORESERVE;
constexpr int kPrivate = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

std::byte* map(int file, size_t bytes, int protection, int kind = kShared) {
  auto* memory = mmap(nullptr, bytes, protection, kind, file, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<std::byte*>(memory);
}

base::WeakTable<uint64_t, PeerProcess>& known() {
  static auto* table = new base::WeakTable<uint64_t, PeerProcess>;
  return *table;
}

} // namespace

std::optional<Segment> Segment::make(size_t bytes) {
  Segment segment;
  auto& [process, file, mark, size] = segment.address_;
  process = getpid();
  size = bytes;
  if (!may_be_as_large_as(bytes) || getrandom(&mark, sizeof mark, 0) != sizeof mark) return std::nullopt;
  file = memfd_create("shardwise", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (file < 0 || ftruncate(static_cast<int>(file), static_cast<off_t>(bytes)) != 0) return std::nullopt;
  // A process that opens the file must not be able to truncate what ranks read.
  if (fcntl(static_cast<int>(file), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) return std::nullopt;
  segment.memory_ = map(static_cast<int>(file), bytes, PROT_READ | PROT_WRITE);
  if (segment.memory_ == nullptr) return std::nullopt;
  std::memcpy(segment.memory_, &mark, sizeof mark);
  // Otherwise parent and child would see each other's writes.
  segment.in_child_ = std::make_unique<base::InForkedChild>([memory = segment.memory_, bytes] {
    constexpr auto kNothing = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(memory, bytes, PROT_NONE, kNothing, -1, 0) == MAP_FAILED) std::abort();
  });
  return segment;
}

std::optional<Segment> Segment::make_private(size_t bytes) {
  Segment segment;
  segment.address_ = {.process = getpid(), .bytes = bytes};
  segment.memory_ = map(-1, bytes, PROT_READ | PROT_WRITE, kPrivate);
  if (segment.memory_ == nullptr) return std::nullopt;
  return segment;
}

Segment::Segment(Segment&& other) noexcept
    : address_(std::exchange(other.address_, {})),
      forks_(other.forks_),
      memory_(std::exchange(other.memory_, nullptr)),
      in_child_(std::move(other.in_child_)) {}

Segment::~Segment() {
  if (memory_ != nullptr) munmap(memory_, address_.bytes);
  close();
}

void Segment::close() {
  if (address_.file >= 0) ::close(static_cast<int>(std::exchange(address_.file, -1)));
}

std::optional<SegmentView> SegmentView::open(const Segment::Address& address) {
  const auto path = c10::str("/proc/", address.process, "/fd/", address.file);
  // Its type is known only once it is open; O_NONBLOCK, because opening a pipe would wait for the other end.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return std::nullopt;
  struct stat facts {};
  const bool fits = fstat(file, &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_size >= 0 &&
                    static_cast<uint64_t>(facts.st_size) == address.bytes;
  SegmentView view;
  if (fits) view.memory_ = map(file, address.bytes, PROT_READ);
  ::close(file);
  if (view.memory_ == nullptr) return std::nullopt;
  view.bytes_ = address.bytes;
  if (std::memcmp(view.memory_, &address.mark, sizeof address.mark) != 0) return std::nullopt;
  return view;
}

SegmentView::SegmentView(SegmentView&& other) noexcept
    : memory_(std::exchange(other.memory_, nullptr)),
      bytes_(other.bytes_) {}

SegmentView::~SegmentView() {
  if (memory_ != nullptr) munmap(const_cast<std::byte*>(memory_), bytes_);
}

std::shared_ptr<PeerProcess> PeerProcess::of(const Segment::Address& arena) {
  return known().find_or_make(arena.mark, [&]() -> std::shared_ptr<PeerProcess> {
    // The process is opened before its memory: if the number had been reused by another process, the arena's mark would
    // be missing there.
    const auto process = static_cast<int>(syscall(SYS_pidfd_open, arena.process, 0));
    if (process < 0) return nullptr;
    auto view = SegmentView::open(arena);
    if (view) return std::shared_ptr<PeerProcess>(new PeerProcess(process, *std::move(view)));
    close(process);
    return nullptr;
  });
}

PeerProcess::PeerProcess(int process, SegmentView arena) : process_(process), arena_(std::move(arena)) {}

PeerProcess::~PeerProcess() {
  close(process_);
}

bool PeerProcess::alive() const {
  pollfd end{.fd = process_, .events = POLLIN, .revents = 0};
  return poll(&end, 1, 0) <= 0;
}

} // namespace shardwise::transport::same_host
