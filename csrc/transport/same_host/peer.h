#pragma once

#include "transport/same_host/segment.h"

#include <shardwise/export.h>

#include <memory>

namespace shardwise::transport::same_host {

/// A process (perhaps this one) and its arena.
class SHARDWISE_API PeerProcess {
 public:
  /// The process that has this arena: one object for each arena. Null if this process may not read it.
  static std::shared_ptr<PeerProcess> of(const Segment::Address& arena);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  const SegmentView& arena() const {
    return arena_;
  }
  /// Whether the process still exists, even if it is stopped.
  bool alive() const;

 private:
  PeerProcess(int process, SegmentView arena);

  /// A pidfd, which becomes readable when the process ends.
  int process_;
  SegmentView arena_;
};

/// What a rank can read of another rank of its process group.
struct Peer {
  std::shared_ptr<PeerProcess> process;
  SegmentView board;
};

} // namespace shardwise::transport::same_host
