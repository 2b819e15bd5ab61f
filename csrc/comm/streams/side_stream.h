#pragma once

#include "comm/streams/last_use.h"

#include <shardwise/detail/export.h>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/FunctionRef.h>

#include <optional>
#include <vector>

namespace shardwise::comm {

/// A stream of ours on each device, beside the one that the program computes on. Made at the first use. On a CPU there
/// is none, and everything stays as it was called.
class SHARDWISE_API SideStream {
 public:
  /// While it lives, this thread issues on the side stream of this device what it would issue on the current one.
  class SHARDWISE_API Scope {
   public:
    Scope(SideStream& side, c10::Device device);
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope();

   private:
    std::optional<c10::Stream> before_;
  };

  /// What is issued here from now on waits for all that was issued on the current stream of this device.
  void follow_current(c10::Device device);
  /// The same for another side stream.
  void follow(SideStream& other, c10::Device device);
  /// The host waits for all that was issued here, on every device.
  void make_host_wait();

 private:
  /// An event of each device is enough: who waits for it waits for what it said at that time.
  struct Lane {
    c10::Stream stream;
    c10::Event event;
  };
  Lane* lane(c10::Device device);

  std::vector<Lane> lanes_;
};

/// Copies from a device to the host's memory, on a stream of ours: what computes goes on, and the host waits once for
/// all of them. On a CPU nothing is different.
class SHARDWISE_API HostCopies {
 public:
  /// Calls `copy` so that what it issues comes after the last use of `from`, and is its last use from then on. It is to
  /// copy to pinned memory without waiting; if it waits for itself, the host need not wait for it again.
  void begin(const at::Tensor& from, LastUse& use, bool waits, c10::function_ref<void()> copy);
  /// The host waits for all that was begun since the last call; not at all if that is nothing.
  void wait();

 private:
  SideStream stream_;
  bool under_way_ = false;
};

} // namespace shardwise::comm
