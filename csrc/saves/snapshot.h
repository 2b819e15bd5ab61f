#pragma once

#include <shardwise/export.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <vector>

namespace shardwise::saves {

/// Copies of values on the host, so that the values may change before the copies are written. Its memory is used again
/// by the next copies; pinned where values are on a device.
class SHARDWISE_API Snapshot {
 public:
  /// Copies each of these. What is issued on a device later comes after its copies; the host does not wait. The copies
  /// before are of no use any more.
  void take(std::vector<at::Tensor>& values);
  /// The host waits until the copies are there.
  void wait();

 private:
  at::Tensor memory_;
  std::vector<c10::Event> copied_;
};

} // namespace shardwise::saves
