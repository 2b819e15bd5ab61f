// Ranks that run the same program through the order of a tree, each in its own way where ranks may differ.
#pragma once

#include "engine/order.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::test {

/// The same numbers everywhere, and quick: there are millions of programs.
class Dice {
 public:
  explicit Dice(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ULL + 1) {}
  /// From 0 to below `sides`.
  size_t roll(size_t sides) {
    state_ ^= state_ << 13U;
    state_ ^= state_ >> 7U;
    state_ ^= state_ << 17U;
    return static_cast<size_t>((state_ >> 11U) % sides);
  }
  bool once_in(size_t times) {
    return roll(times) == 0;
  }

 private:
  uint64_t state_;
};

/// One rank: what its full parameters and sums are, and what it put on its two process groups. The first rule that was
/// broken is kept.
class OrderRank final : public engine::Performer {
 public:
  using UnitId = engine::UnitId;
  enum class Full : uint8_t { freed, gathering, there };

  OrderRank(size_t units, uint64_t seed) : own(seed), full_(units, Full::freed), used_(units, false) {}

  engine::Order order;
  /// For what ranks may do in ways of their own.
  Dice own;
  std::vector<UnitId> gathers;
  std::vector<UnitId> sums;
  /// Both of them: with sums in a stream what is issued later waits for what was issued before, even on another group.
  std::vector<std::pair<const char*, UnitId>> stream;
  /// That were ever under way together.
  size_t most_sums = 0;
  std::string broken;
  /// Which unit is gathered where the user named one.
  UnitId listed = 0;

  Full full(UnitId unit) const {
    return full_[unit];
  }
  void rule(bool holds, const char* text, UnitId unit) {
    if (!holds && broken.empty()) broken = std::string(text) + ": unit " + std::to_string(unit);
  }

  void enter(UnitId unit, engine::Keep keep, engine::Order::Moment moment) {
    entering_ = unit;
    order.enter(unit, keep, moment, *this);
    entering_.reset();
    used_[unit] = true;
    rule(full_[unit] == Full::there, "a unit that was entered is there", unit);
    const auto head = order.head(unit);
    rule(full_[head] == Full::there, "a companion's head is there with it", unit);
    for (const auto companion : order.companions(head)) {
      rule(full_[companion] == Full::there, "companions are there together", companion);
      used_[companion] = true;
    }
    used_[head] = true;
    if (keep == engine::Keep::outer && moment.backward < 0) others_are_closed(unit);
  }
  void by_hand(UnitId unit) {
    if (full_[unit] != Full::freed) return;
    start(unit);
    order.gathered_by_hand(unit);
  }
  void free_by_hand(UnitId unit) {
    full_[unit] = Full::freed;
    used_[unit] = false;
  }
  /// All that is to be freed at the end of a backward is.
  void backward_is_over() {
    for (const auto unit : order.made()) {
      if (order.timing(unit).reshard_after_backward) rule(full_[unit] == Full::freed, "all is freed in the end", unit);
      used_[unit] = false;
    }
    rule(in_flight_.empty() || open_sums_, "sums end", 0);
  }

  bool perform(engine::Action action) override {
    using Kind = engine::Action::Kind;
    const auto unit = action.unit;
    switch (action.kind) {
      case Kind::gather: {
        const bool waits = full_[unit] != Full::there;
        gather_ahead(unit);
        full_[unit] = Full::there;
        return waits;
      }
      case Kind::gather_ahead:
        gather_ahead(unit);
        break;
      case Kind::gather_list:
        gather_ahead(listed);
        break;
      case Kind::free:
        free(unit);
        break;
      case Kind::start_sum:
        start_sum(unit);
        break;
      case Kind::poll_sum:
        return poll_sum(unit);
      case Kind::finish_first_sum:
        open_sums_ = true;
        break;
      case Kind::wait_sum:
        rule(in_flight_.empty() || in_flight_.front() == unit, "sums are waited for in their order", unit);
        std::erase(in_flight_, unit);
        done_.erase(unit);
        break;
      case Kind::publish:
        rule(in_flight_.empty(), "sums are over before gradients are published", unit);
        last_summed_.reset();
        open_sums_ = false;
        break;
      case Kind::run_hooks:
        break;
      case Kind::forget_backward:
        in_flight_.clear();
        done_.clear();
        last_summed_.reset();
        break;
    }
    return false;
  }

 private:
  void gather_ahead(UnitId unit) {
    if (full_[unit] == Full::freed) start(unit);
  }
  void free(UnitId unit) {
    rule(
        !entering_ || (!order.lies_below(*entering_, unit) && order.head(*entering_) != order.head(unit)),
        "outer units and companions stay while inner ones are used", unit);
    full_[unit] = Full::freed;
    used_[unit] = false;
  }
  void start_sum(UnitId unit) {
    size_t most = 1;
    for (const auto one : order.made()) most = std::max(most, order.timing(one).sums_in_flight);
    rule(in_flight_.size() < most, "so many sums are under way at a time", unit);
    most_sums = std::max(most_sums, in_flight_.size() + 1);
    rule(order.takes_part(unit), "who takes no part is not summed", unit);
    const auto place = [&](UnitId one) { return std::find(order.sums().begin(), order.sums().end(), one); };
    rule(!last_summed_ || place(*last_summed_) < place(unit), "sums are in the one order", unit);
    last_summed_ = unit;
    in_flight_.push_back(unit);
    sums.push_back(unit);
    if (gathers_in_backward()) stream.emplace_back("sum", unit);
  }
  bool poll_sum(UnitId unit) {
    const bool is_there = std::find(in_flight_.begin(), in_flight_.end(), unit) != in_flight_.end();
    rule(is_there, "a sum under way is asked for", unit);
    for (const auto before : in_flight_) {
      if (before == unit) break;
      rule(done_.contains(before), "sums are looked at once those before them are done", unit);
    }
    if (order.timing(unit).sums_in_stream || own.once_in(2)) done_.insert(unit);
    return done_.contains(unit);
  }
  void start(UnitId unit) {
    full_[unit] = Full::gathering;
    if (!order.timing(unit).is_gathered) return;
    gathers.push_back(unit);
    if (order.timing(unit).sums_in_stream) stream.emplace_back("gather", unit);
  }
  /// If nothing is gathered there, sums wait for nothing.
  bool gathers_in_backward() {
    return std::any_of(order.made().begin(), order.made().end(), [&](UnitId unit) {
      const auto& timing = order.timing(unit);
      return timing.sums_in_stream && timing.is_gathered && order.timing(order.head(unit)).unshard_in_backward;
    });
  }
  /// At most the units that this one lies below are there with it, of those that are freed after their forward.
  void others_are_closed(UnitId unit) {
    for (const auto other : order.made()) {
      const auto head = order.head(other);
      const bool is_around = head == order.head(unit) || order.lies_below(unit, head);
      const bool may = is_around || !order.reshards_after_forward(other);
      rule(may || full_[other] != Full::there || !used_[other], "at most the outer units are there", other);
    }
  }

  std::vector<Full> full_;
  /// In the pass that runs.
  std::vector<bool> used_;
  std::optional<UnitId> entering_;
  std::vector<UnitId> in_flight_;
  std::set<UnitId> done_;
  std::optional<UnitId> last_summed_;
  bool open_sums_ = false;
};

} // namespace shardwise::test
