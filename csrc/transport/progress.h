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

/// Where a rank is in the order of its collectives: which one is under way, by when it must be over, and what ended
/// them all. One thread goes along it; any may close it.
///
/// What goes wrong raises c10::DistBackendError with this rank, the other rank and the collective. The first failure
/// ends it, for nobody knows what is still on its way: everything later raises it again.
class Progress {
 public:
  /// `names` are what errors call the ranks; empty: by their positions.
  Progress(int rank, int size, std::vector<int64_t> names) : rank_(rank), size_(size), names_(std::move(names)) {}

  int rank() const {
    return rank_;
  }
  int size() const {
    return size_;
  }
  /// Of the collective under way, counted from 1; all ranks count alike.
  uint64_t number() const {
    return number_;
  }

  /// The next collective begins, and must be over within the timeout.
  void begin(const Signature& signature, std::chrono::milliseconds timeout);
  /// "rank 1 of 4", or "rank 6 (number 1 of the 4 of its process group)".
  std::string me() const;
  int64_t name_of(int rank) const {
    return names_.empty() ? rank : names_[static_cast<size_t>(rank)];
  }
  /// "rank 1 of 4: an all-reduce (sum) of 16 elements of Float"
  std::string place() const;
  /// What is left of the time; at least a millisecond.
  std::chrono::milliseconds left() const;
  bool late() const;
  /// Raises when it is closed, or a collective failed.
  void check();
  [[noreturn]] void fail(const std::string& text);
  /// For a peer that sent nothing, or did not take what this rank sent: it is late or gone.
  [[noreturn]] void fail(int peer, bool to_peer, const std::string& reason_given);
  /// For a peer whose process ended.
  [[noreturn]] void fail_dead(int peer);
  /// For a peer that failed first, and said why.
  [[noreturn]] void fail_with(int peer, const std::string& its_failure);
  /// Is told the first failure before anybody else hears of it here.
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
  /// The text of the first failure; empty as long as there is none.
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
