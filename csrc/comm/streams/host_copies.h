#pragma once

#include "comm/streams/last_use.h"
#include "comm/streams/side_stream.h"

#include <shardwise/export.h>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace shardwise::comm {

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
