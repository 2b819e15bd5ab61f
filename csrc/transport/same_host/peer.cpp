#include "transport/same_host/peer.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <utility>

// The headers of older systems do not know it.
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace shardwise::transport::same_host {
namespace {

/// Never destroyed, as what is in it may go later than any static object.
struct Known {
  std::mutex mutex;
  std::map<uint64_t, std::weak_ptr<PeerProcess>> by_mark;
};

Known& known() {
  static auto* value = new Known;
  return *value;
}

} // namespace

std::shared_ptr<PeerProcess> PeerProcess::of(const Segment::Address& arena) {
  auto& all = known();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.by_mark, [](const auto& entry) { return entry.second.expired(); });
  auto& entry = all.by_mark[arena.mark];
  if (auto peer = entry.lock()) return peer;
  // First the process, then its memory: were the number another's by now, it would not have that.
  const auto process = static_cast<int>(syscall(SYS_pidfd_open, arena.process, 0));
  if (process < 0) return nullptr;
  auto view = SegmentView::open(arena);
  if (!view) {
    close(process);
    return nullptr;
  }
  std::shared_ptr<PeerProcess> peer(new PeerProcess(process, *std::move(view)));
  entry = peer;
  return peer;
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
