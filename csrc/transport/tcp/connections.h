#pragma once

#include "transport/carrier.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::transport::tcp {

/// What a message belongs to. Messages of different phases or different collectives are never confused.
enum class Phase : uint8_t { announcement, gather, sum };

/// A message in flight, to or from a peer.
struct Message {
  int peer = 0;
  bool to_peer = false;
  /// Null if it could not even be started; then `reason` says why.
  c10::intrusive_ptr<c10d::Work> work;
  std::string reason;
};

/// This rank's connections: sends and receives over a carrier, for the collectives of its progress. One thread uses
/// them. Errors fail the progress.
class Connections {
 public:
  explicit Connections(Carrier& carrier);

  int rank() const {
    return carrier_.progress().rank();
  }
  int size() const {
    return carrier_.progress().size();
  }
  Progress& progress() {
    return carrier_.progress();
  }
  /// `end_reason` returns what a peer said before it closed its connections; empty if it said nothing.
  void on_closed(std::function<std::string(int peer)> end_reason) {
    end_reason_ = std::move(end_reason);
  }

  /// Neither raises; wait() does. The memory must live until then, or until the message is dropped.
  Message send(int peer, const std::byte* data, size_t bytes, Phase phase);
  Message receive(int peer, std::byte* data, size_t bytes, Phase phase);
  void wait(const Message& message);
  void wait(const std::vector<Message>& messages);
  /// Whether the message arrived (or was taken) within `time`. If not, the connection may be closed: no more waits
  /// after that.
  static bool has_arrived(const Message& message, std::chrono::milliseconds time) noexcept;

  /// Bytes sent to `peer` so far, without announcements.
  uint64_t sent_to(int peer) const {
    return sent_[peer];
  }

 private:
  int tag(Phase phase) const;
  template <typename Start>
  Message start(int peer, bool to_peer, const Start& start);
  [[noreturn]] void fail(const Message& message, const std::string& reason);

  Carrier& carrier_;
  std::vector<std::atomic<uint64_t>> sent_;
  std::function<std::string(int)> end_reason_;
};

} // namespace shardwise::transport::tcp
