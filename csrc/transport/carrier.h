#pragma once

#include "transport/progress.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::transport {

/// Tags from this one up are reserved for the transport.
constexpr int kFirstTag = 0x40000000;

/// A back end's private Gloo, and the Progress of the collectives that run over it. One thread uses it; any thread may
/// close it. Errors fail the Progress.
class Carrier {
 public:
  /// `names` are the rank numbers that errors show; if empty, positions in the group.
  Carrier(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int64_t> names);

  Progress& progress() {
    return progress_;
  }
  c10d::Backend& gloo() const {
    return *gloo_;
  }
  /// For other threads: null once it was released.
  c10::intrusive_ptr<c10d::Backend> shared_gloo() {
    const std::lock_guard lock(mutex_);
    return gloo_;
  }
  /// Waits for a message for as long as the current collective has time left. Returns nothing if it is done, else the
  /// reason.
  std::optional<std::string> why_not_done(const c10::intrusive_ptr<c10d::Work>& message);
  /// Waits for a collective of Gloo's own.
  void wait(c10d::Work& work);
  /// Fails every current and later wait with an error that says that the group was shut down.
  void close();
  /// Drops the connections, so that peers fail at once. Only after close(), or after the Progress failed.
  void release();

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  Progress progress_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Work> waited_for_;
};

} // namespace shardwise::transport
