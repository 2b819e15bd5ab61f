#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace shardwise::comm {

/// What ranks that wait tell each other, through stores that they share: a note each. A store may be far away, or not
/// answer at all, so it is asked on a thread of its own, and no call of these waits, unless it says so.
class Notes {
 public:
  using Bytes = std::vector<uint8_t>;
  /// A store, this rank's key there, and those of others.
  struct Board {
    c10::intrusive_ptr<c10d::Store> store;
    std::string mine;
    std::vector<std::string> others;
  };
  /// A note that somebody left on the board of that number.
  struct Found {
    size_t board = 0;
    Bytes note;
  };

  explicit Notes(std::vector<Board> boards);
  ~Notes();
  Notes(const Notes&) = delete;
  Notes& operator=(const Notes&) = delete;

  /// Others will find this in the place of the one before; what they left is then asked for.
  void leave(Bytes mine);
  /// What others had left when `mine` was there for them; nothing as long as no answer came.
  std::vector<Found> answers_to(const Bytes& mine) const;
  /// Waits until what was left last is there for the others, at most that long.
  void flush(std::chrono::milliseconds limit) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

} // namespace shardwise::comm
