#pragma once

#include "comm/direct_course.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::comm::direct {

/// Tags from here on are the transport's own.
constexpr int kFirstTag = 0x40000000;

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

/// One rank's connections: the sends and receives of a back end of its own, for the collectives of a course. One thread
/// uses it; any may close it. What goes wrong fails the course.
class Wire {
 public:
  Wire(c10::intrusive_ptr<c10d::Backend> carrier, std::vector<int64_t> names);

  int rank() const {
    return course_.rank();
  }
  int size() const {
    return course_.size();
  }
  Course& course() {
    return course_;
  }
  /// Tells what a peer said that failed, and closed its connections: empty where it said nothing.
  void on_closed(std::function<std::string(int peer)> last_words) {
    last_words_ = std::move(last_words);
  }

  /// They raise nothing: wait() does. The memory must stay until then, or until the message is dropped.
  Message send(int peer, const std::byte* data, size_t bytes, Phase phase);
  Message receive(int peer, std::byte* data, size_t bytes, Phase phase);
  void wait(const Message& message);
  /// Whether all of it came, or was taken, within a time that may be the last: connections close after it.
  static bool has_come(const Message& message, std::chrono::milliseconds time) noexcept;
  void wait(const std::vector<Message>& messages);
  /// Waits for a collective of the carrier's own.
  void wait(c10d::Work& work);

  /// Bytes sent to a peer so far, without announcements.
  uint64_t sent_to(int peer) const {
    return sent_[peer];
  }
  c10d::Backend& carrier() const;
  /// Whoever waits, and whoever will, gets an error that says so.
  void close();
  /// Lets go of the connections of a wire that is closed, or whose course failed, so that peers fail at once.
  void release();

 private:
  int tag(Phase phase) const;
  template <typename Start>
  Message start(int peer, bool to_peer, const Start& start);

  [[noreturn]] void fail(const Message& message, const std::string& reason);

  c10::intrusive_ptr<c10d::Backend> carrier_;
  Course course_;
  std::vector<std::atomic<uint64_t>> sent_;
  std::function<std::string(int)> last_words_;
  std::mutex mutex_;
  c10::intrusive_ptr<c10d::Work> waited_for_;
};

} // namespace shardwise::comm::direct
