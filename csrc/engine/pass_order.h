#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace shardwise::engine {

/// The order in which a pass, that is a forward or a backward, used what was gathered for it; and so what comes next in
/// one like it. `Use` is compared with ==.
template <typename Use>
class PassOrder {
 public:
  /// Returns what came next in the pass before; null when nothing did. A pass may leave out what the one before used,
  /// as units whose full copies are still there, and use others in between.
  const Use* used(Use use) {
    if (now_.size() == kLongestPass) end_pass();
    const auto found = std::find(before_.begin() + static_cast<std::ptrdiff_t>(next_), before_.end(), use);
    if (found != before_.end()) next_ = static_cast<std::size_t>(found - before_.begin()) + 1;
    now_.push_back(std::move(use));
    return next();
  }
  /// Whether a pass seems to begin anew with this: it was used in this one, and is not what comes next.
  bool comes_round(const Use& use) const {
    const auto* expected = next();
    if (expected != nullptr && *expected == use) return false;
    return std::find(now_.begin(), now_.end(), use) != now_.end();
  }
  /// The pass is over. An empty one does not count.
  void end_pass() {
    if (!now_.empty()) before_ = std::move(now_);
    forget_pass();
  }
  /// The pass failed.
  void forget_pass() {
    now_.clear();
    next_ = 0;
  }

  bool operator==(const PassOrder&) const = default;

 private:
  /// Of a program that runs forwards for ever, with gradients that nobody asks for.
  static constexpr std::size_t kLongestPass = 65536;

  const Use* next() const {
    return next_ < before_.size() ? &before_[next_] : nullptr;
  }

  std::vector<Use> before_;
  /// The first of them that is still to come.
  std::size_t next_ = 0;
  std::vector<Use> now_;
};

} // namespace shardwise::engine
