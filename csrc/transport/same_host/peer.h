#pragma once

#include "transport/same_host/segment.h"

#include <shardwise/export.h>

#include <memory>

namespace shardwise::transport::same_host {

/// A process, which may be this one, and its arena.
class SHARDWISE_API PeerProcess {
 public:
  /// One for each arena. Null where this process may not read it.
  static std::shared_ptr<PeerProcess> of(const Segment::Address& arena);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  const SegmentView& arena() const {
    return arena_;
  }
  /// Whether it is still there, stopped or not.
  bool alive() const;

 private:
  PeerProcess(int process, SegmentView arena);

  /// Tells when it ends.
  int process_;
  SegmentView arena_;
};

/// What a rank reads of another one of its process group.
struct Peer {
  std::shared_ptr<PeerProcess> process;
  SegmentView board;
};

} // namespace shardwise::transport::same_host
