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

/// What a message is part of. Those of different phases, and of different collectives, never meet.
enum class Phase : uint8_t { announcement, gather, sum };

/// A message under way, to or from a peer.
struct Message {
  int peer = 0;
  bool to_peer = false;
  /// Null when it could not even be started, with the reason.
  c10::intrusive_ptr<c10d::Work> work;
  std::string reason;
};

/// One rank's connections: sends and receives of a carrier, for the collectives of its progress. One thread uses them.
/// What goes wrong fails the progress.
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
  /// Tells what a peer said that failed, and closed its connections: empty where it said nothing.
  void on_closed(std::function<std::string(int peer)> last_words) {
    last_words_ = std::move(last_words);
  }

  /// They raise nothing: wait() does. The memory must stay until then, or until the message is dropped.
  Message send(int peer, const std::byte* data, size_t bytes, Phase phase);
  Message receive(int peer, std::byte* data, size_t bytes, Phase phase);
  void wait(const Message& message);
  void wait(const std::vector<Message>& messages);
  /// Whether all of it came, or was taken, within a time that may be the last: connections close after it.
  static bool has_come(const Message& message, std::chrono::milliseconds time) noexcept;

  /// Bytes sent to a peer so far, without announcements.
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
  std::function<std::string(int)> last_words_;
};

} // namespace shardwise::transport::tcp
