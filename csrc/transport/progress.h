#pragma once

#include "transport/signature.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::transport {

/// A rank's position in its sequence of collectives: the current one, its deadline, and the failure that ended them
/// all. One thread uses it; any thread may close it.
///
/// Failures raise c10::DistBackendError with this rank, the other rank and the collective. The first one is final,
/// because nobody knows what is still in flight: every later collective raises it again.
class Progress {
 public:
  /// `names` are the rank numbers that errors show; if empty, positions in the group.
  Progress(int rank, int size, std::vector<int64_t> names) : rank_(rank), size_(size), names_(std::move(names)) {}

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  /// The number of the current collective, from 1; the same on all ranks.
  uint64_t number() const {
    return number_;
  }

  /// Begins the next collective, which must end within the timeout.
  void begin(const Signature& signature, std::chrono::milliseconds timeout);
  /// "rank 1 of 4", or "rank 6 (number 1 of the 4 of its process group)".
  std::string me() const;
  int64_t name_of(int rank) const {
    return names_.empty() ? rank : names_[static_cast<size_t>(rank)];
  }
  /// "rank 1 of 4: an all-reduce (sum) of 16 elements of Float"
  std::string describe_call() const;
  /// The time left for the current collective; at least a millisecond.
  std::chrono::milliseconds left() const;
  bool late() const;
  /// Raises if this was closed, or if a collective failed.
  void check();
  [[noreturn]] void fail(const std::string& text);
  /// The peer sent nothing, or did not take what this rank sent: it is late or gone.
  [[noreturn]] void fail(int peer, bool to_peer, const std::string& details);
  /// "... failed, because rank 2 ", and this.
  [[noreturn]] void fail_because(int peer, const std::string& what);
  /// The peer's process ended.
  [[noreturn]] void fail_dead(int peer);
  /// The peer failed first, and said why.
  [[noreturn]] void fail_with(int peer, const std::string& its_failure);
  /// `tell` gets the text of the first failure before anybody else on this rank sees it.
  void on_failure(std::function<void(const std::string&)> tell) {
    tell_ = std::move(tell);
  }

  void close() {
    closed_ = true;
  }
  bool closed() const {
    return closed_;
  }
  bool broken() const {
    return !broken_.empty();
  }
  /// The text of the first failure; empty if there is none.
  const std::string& failure() const {
    return broken_;
  }

 private:
  const int rank_;
  const int size_;
  const std::vector<int64_t> names_;
  std::function<void(const std::string&)> tell_;
  Signature signature_;
  uint64_t number_ = 0;
  std::chrono::milliseconds timeout_{0};
  std::chrono::steady_clock::time_point deadline_;
  std::string broken_;
  std::atomic<bool> closed_ = false;
};

} // namespace shardwise::transport
