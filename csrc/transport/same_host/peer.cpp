#include "transport/same_host/peer.h"

#include "base/weak_table.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

// Headers of older systems lack it.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace shardwise::transport::same_host {
namespace {

base::WeakTable<uint64_t, PeerProcess>& known() {
  static auto* table = new base::WeakTable<uint64_t, PeerProcess>;
  return *table;
}

} // namespace

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
