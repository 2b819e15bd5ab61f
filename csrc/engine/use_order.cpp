#include "engine/use_order.h"

#include "engine/unit.h"

#include <algorithm>

namespace shardwise::engine {
namespace {

/// Of a program that runs forwards for ever, with gradients that nobody asks for.
constexpr size_t kLongestPass = 65536;

} // namespace

// A pass may leave units out, as those whose full copies are still there, and run others in between.
std::shared_ptr<Unit> UseOrder::used(const std::shared_ptr<Unit>& unit) {
  if (now_.size() == kLongestPass) end_pass();
  now_.push_back(unit);
  const auto same = [&](const std::weak_ptr<Unit>& other) { return other.lock() == unit; };
  const auto found = std::find_if(before_.begin() + static_cast<std::ptrdiff_t>(next_), before_.end(), same);
  if (found != before_.end()) next_ = static_cast<size_t>(found - before_.begin()) + 1;
  return next_ < before_.size() ? before_[next_].lock() : nullptr;
}

bool UseOrder::is_next(const Unit& unit) const {
  return next_ < before_.size() && before_[next_].lock().get() == &unit;
}

bool UseOrder::comes_round(const Unit& unit) const {
  const auto same = [&](const std::weak_ptr<Unit>& other) { return other.lock().get() == &unit; };
  return !is_next(unit) && std::any_of(now_.begin(), now_.end(), same);
}

void UseOrder::end_pass() {
  if (!now_.empty()) before_ = std::move(now_);
  forget_pass();
}

void UseOrder::forget_pass() {
  now_.clear();
  next_ = 0;
}

} // namespace shardwise::engine
