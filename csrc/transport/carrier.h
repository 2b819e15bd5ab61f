#pragma once

#include "transport/progress.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::transport {

/// Tags from here on are the transport's own.
constexpr int kFirstTag = 0x40000000;

/// The Gloo that a back end has for itself, and the progress of the collectives that it serves. One thread uses it; any
/// may close it. What goes wrong fails the progress.
class Carrier {
 public:
  /// `names` are what errors call the ranks; empty: by their positions.
  Carrier(c10::intrusive_ptr<c10d::Backend> gloo, std::vector<int64_t> names);

  Progress& progress() {
    return progress_;
  }
  c10d::Backend& gloo() const {
    return *gloo_;
  }
  /// Waits for a message, within the time that the collective under way has. Nothing where it is done, else why not.
  std::optional<std::string> why_not_done(const c10::intrusive_ptr<c10d::Work>& message);
  /// Waits for a collective of Gloo's own.
  void wait(c10d::Work& work);
  /// Whoever waits, and whoever will, gets an error that says so.
  void close();
  /// Lets go of the connections of a carrier that is closed, or whose progress failed, so that peers fail at once.
  void release();

 private:
  c10::intrusive_ptr<c10d::Backend> gloo_;
  Progress progress_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Work> waited_for_;
};

} // namespace shardwise::transport
