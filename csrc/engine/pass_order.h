#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace shardwise::engine {

/// A unit's number within its tree.
using UnitId = std::size_t;

/// The order in which a pass (a forward or a backward) used what was gathered for it, which tells what comes next in a
/// similar pass.
class PassOrder {
 public:
  /// Notes a use, and returns what is expected next by the last pass; null for nothing. A pass may skip uses of the
  /// last one, such as units whose full copies are still there, and have others in between.
  const UnitId* used(UnitId use) {
    if (now_.size() == kLongestPass) end_pass();
    const auto found = std::find(before_.begin() + static_cast<std::ptrdiff_t>(next_), before_.end(), use);
    if (found != before_.end()) next_ = static_cast<std::size_t>(found - before_.begin()) + 1;
    now_.push_back(use);
    return next();
  }
  /// Whether this use seems to begin a new pass: it occurred in this one already, and is not what is expected next.
  bool begins_new_pass(UnitId use) const {
    const auto* expected = next();
    if (expected != nullptr && *expected == use) return false;
    return std::find(now_.begin(), now_.end(), use) != now_.end();
  }
  /// The pass is over. An empty one does not count.
  void end_pass() {
    if (!now_.empty()) before_ = std::move(now_);
    forget_pass();
  }
  /// The pass failed: it is not remembered.
  void forget_pass() {
    now_.clear();
    next_ = 0;
  }

 private:
  /// For programs that run only forwards, with gradients enabled, and never a backward.
  static constexpr std::size_t kLongestPass = 65536;

  const UnitId* next() const {
    return next_ < before_.size() ? &before_[next_] : nullptr;
  }

  std::vector<UnitId> before_;
  /// The index in before_ of what is expected next.
  std::size_t next_ = 0;
  std::vector<UnitId> now_;
};

} // namespace shardwise::engine
