#pragma once

#include "comm/direct_signature.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <cstddef>
#include <mutex>
#include <string>
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

/// One rank's connections: the sends and receives of a back end of its own. One thread uses it; any may close it.
///
/// What goes wrong raises c10::DistBackendError with this rank, the other rank and the collective. The first failure
/// breaks the wire, for nobody knows what is still on its way: everything later raises it again.
class Wire {
 public:
  explicit Wire(c10::intrusive_ptr<c10d::Backend> carrier);

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }

  /// The next collective begins, and must be over within the timeout.
  void begin(const Signature& signature, std::chrono::milliseconds timeout);
  /// They raise nothing: wait() does. The memory must stay until then, or until the message is dropped.
  Message send(int peer, const std::byte* data, size_t bytes, Phase phase);
  Message receive(int peer, std::byte* data, size_t bytes, Phase phase);
  void wait(const Message& message);
  void wait(const std::vector<Message>& messages);
  /// Waits for a collective of the carrier's own.
  void wait(c10d::Work& work);

  c10d::Backend& carrier() const;
  /// "rank 1 of 4: an all-reduce (sum) of 16 elements of Float"
  std::string place() const;
  /// Whoever waits, and whoever will, gets an error that says so.
  void close();
  bool broken() const;
  /// Lets go of the connections of a wire that is closed or broken, so that peers fail at once.
  void release();

 private:
  int tag(Phase phase) const;
  std::chrono::milliseconds left() const;
  void check();
  [[noreturn]] void fail(const std::string& text);
  [[noreturn]] void fail(const Message& message, const std::string& reason_given);
  template <typename Start>
  Message start(int peer, bool to_peer, const Start& start);

  c10::intrusive_ptr<c10d::Backend> carrier_;
  const int rank_;
  const int size_;
  Signature signature_;
  /// Of collectives so far; all ranks count alike.
  uint32_t number_ = 0;
  std::chrono::milliseconds timeout_{0};
  std::chrono::steady_clock::time_point deadline_;
  std::string broken_;
  std::mutex mutex_;
  bool closed_ = false;
  c10::intrusive_ptr<c10d::Work> waited_for_;
};

} // namespace shardwise::comm::direct
