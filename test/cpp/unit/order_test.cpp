// What every sequence of events must hold. The programs are random; a failure prints the seed.
#include "engine/order.h"
#include "order_ranks.h"

#include <catch2/catch.hpp>

#include <map>
#include <utility>

using shardwise::engine::Keep;
using shardwise::engine::Order;
using shardwise::engine::UnitId;
using Kind = shardwise::engine::Action::Kind;
using shardwise::engine::UnitTiming;
using shardwise::test::Dice;
using shardwise::test::OrderRank;

namespace {

constexpr size_t kRanks = 2;
constexpr size_t kParameters = 2;

/// A tree and a program for it, which all ranks run.
class Program {
 public:
  explicit Program(uint64_t seed) : dice_(seed), units_(1 + dice_.roll(5)), in_stream_(dice_.once_in(3)) {
    for (size_t rank = 0; rank < kRanks; ++rank) ranks_.emplace_back(units_, kRanks * seed + rank + 1);
    for (size_t i = 0; i < units_; ++i) {
      // The outermost comes last, as it is made last.
      outer_.push_back(i + 1 == units_ ? std::nullopt : std::optional(i + 1 + dice_.roll(units_ - i - 1)));
      auto timing = random_timing();
      const bool has_inner = std::find(outer_.begin(), outer_.end(), i) != outer_.end();
      timing.is_companion = outer_.back() && !has_inner && dice_.once_in(4);
      for (auto& rank : ranks_) rank.order.add(static_cast<int64_t>(i), timing, outer_.back());
    }
  }

  void run() {
    const auto steps = 1 + dice_.roll(4);
    for (size_t step = 0; step < steps && broken().empty() && !is_told_; ++step) {
      if (dice_.once_in(6)) change();
      if (dice_.once_in(6)) gather_by_hand();
      if (dice_.once_in(5)) forward(/*with_gradients=*/false);
      const auto forwards = 1 + dice_.roll(2);
      for (size_t i = 0; i < forwards; ++i) forward(/*with_gradients=*/true);
      backward();
      if (dice_.once_in(10)) everyone([](OrderRank& rank) { rank.order.reset(rank); });
    }
    everyone([](OrderRank& rank) { rank.order.finish_sums(rank); });
  }

  std::string broken() const {
    for (const auto& rank : ranks_) {
      if (!rank.broken.empty()) return rank.broken;
      if (is_told_) continue;
      if (rank.gathers != ranks_.front().gathers) return "ranks gather differently";
      if (rank.sums != ranks_.front().sums) return "ranks sum differently";
      if (rank.stream != ranks_.front().stream) return "streams differ:" + shown(rank) + shown(ranks_.front());
    }
    return "";
  }
  static std::string shown(const OrderRank& rank) {
    std::string text = "\n";
    for (const auto& [what, unit] : rank.stream) text += std::string(what) + " " + std::to_string(unit) + ", ";
    return text;
  }
  size_t events() const {
    return events_;
  }
  size_t most_sums() const {
    return ranks_.front().most_sums;
  }

 private:
  struct Visit {
    UnitId unit;
    bool is_seen_to_end;
  };

  UnitTiming random_timing() {
    UnitTiming timing;
    if (dice_.once_in(3)) timing.reshard_after_forward = dice_.once_in(2);
    timing.reshard_after_backward = !dice_.once_in(5);
    timing.unshard_in_backward = !dice_.once_in(8);
    timing.is_gathered = !dice_.once_in(10);
    timing.always_sums = dice_.once_in(4);
    timing.sums_in_flight = dice_.once_in(6) ? 1 + dice_.roll(3) : 1;
    timing.sums_in_stream = in_stream_;
    timing.has_several_modules = dice_.once_in(6);
    timing.has_forward_list = dice_.once_in(10);
    timing.has_backward_list = dice_.once_in(10);
    return timing;
  }

  template <typename Do>
  void everyone(const Do& act) {
    for (auto& rank : ranks_) act(rank);
    ++events_;
  }

  void change() {
    const auto unit = dice_.roll(units_);
    const auto timing = random_timing();
    const bool prefetches = !dice_.once_in(4);
    const auto listed = dice_.roll(units_);
    everyone([&](OrderRank& rank) {
      // Not how many ranks there are.
      const bool is_gathered = rank.order.timing(unit).is_gathered;
      const bool is_companion = rank.order.timing(unit).is_companion;
      rank.order.timing(unit) = timing;
      rank.order.timing(unit).is_gathered = is_gathered;
      rank.order.timing(unit).is_companion = is_companion;
      rank.order.prefetches = prefetches;
      rank.listed = listed;
    });
  }

  /// A unit and its companions.
  std::vector<UnitId> call(UnitId unit) const {
    const auto& order = ranks_.front().order;
    std::vector<UnitId> call{order.head(unit)};
    for (const auto companion : order.companions(call.front())) call.push_back(companion);
    return call;
  }

  // Some ranks use it, some do not.
  void gather_by_hand() {
    for (const auto unit : call(dice_.roll(units_))) {
      everyone([&](OrderRank& rank) { rank.by_hand(unit); });
      everyone([&](OrderRank& rank) {
        if (rank.full(unit) == OrderRank::Full::gathering) rank.perform({Kind::gather, unit});
        rank.free_by_hand(unit);
      });
    }
  }

  // Ranks may use a unit more often than others do in a row, and any parameter of the call first.
  void use(UnitId head, Keep keep, Order::Moment moment) {
    const auto units = call(head);
    everyone([&](OrderRank& rank) {
      const auto times = 1 + rank.own.roll(2);
      for (size_t i = 0; i < times; ++i) {
        const auto unit = units[rank.own.roll(units.size())];
        if (!rank.order.is_in(unit, keep, moment, rank)) rank.enter(unit, keep, moment);
      }
    });
  }

  void visit(UnitId unit, bool with_gradients) {
    const Order::Moment moment{.backward = -1, .with_gradients = with_gradients};
    use(unit, Keep::outer, moment);
    for (UnitId inner = 0; inner < unit; ++inner) {
      if (outer_[inner] != unit || ranks_.front().order.head(inner) != inner || dice_.once_in(6)) continue;
      const auto times = dice_.once_in(6) ? 2 : 1;
      for (int i = 0; i < times; ++i) visit(inner, with_gradients);
      if (dice_.once_in(2)) use(unit, Keep::outer, moment);
    }
    const bool exactly = dice_.once_in(2);
    if (exactly || dice_.once_in(2)) everyone([&](OrderRank& rank) { rank.order.leave(unit, exactly, rank); });
    if (with_gradients) visits_.push_back({unit, exactly});
  }

  void forward(bool with_gradients) {
    const auto outermost = units_ - 1;
    visit(outermost, with_gradients);
    everyone([&](OrderRank& rank) { rank.order.leave(outermost, /*exactly=*/false, rank); });
  }

  void begin_backward(Order::Moment moment) {
    const bool late = dice_.once_in(5);
    everyone([&](OrderRank& rank) {
      rank.order.begin_backward(moment.backward, rank);
      for (const auto& visit : visits_) {
        for (const auto unit : call(visit.unit)) {
          for (size_t i = 0; i < kParameters; ++i) {
            // Unused on some ranks. But a backward brings a gradient on all ranks or on none.
            if (is_first({unit, i}) || !rank.own.once_in(4)) expected(rank).insert_or_assign({unit, i}, true);
          }
        }
      }
      for (const auto& [parameter, is_expected] : expected(rank)) rank.order.expect(parameter.first, parameter.second);
      rank.order.set_late(late);
    });
  }

  using Parameter = std::pair<UnitId, size_t>;
  using Parameters = std::map<Parameter, bool>;
  Parameters& expected(const OrderRank& rank) {
    return expected_[static_cast<size_t>(&rank - ranks_.data())];
  }

  /// The first unit whose gradients come is the one whose last visit comes first.
  bool is_first(const Parameter& parameter) const {
    for (size_t i = visits_.size(); i-- > 0;) {
      if (is_last_visit(i)) return parameter == Parameter(visits_[i].unit, 0);
    }
    return false;
  }
  /// Seen from the end: a unit has its gradients once its first visit was gone back to.
  bool is_last_visit(size_t number) const {
    const auto same = [&](const Visit& other) { return other.unit == visits_[number].unit; };
    return std::none_of(visits_.begin(), visits_.begin() + static_cast<std::ptrdiff_t>(number), same);
  }

  void backward() {
    const Order::Moment moment{.backward = next_backward_++, .with_gradients = false};
    expected_.assign(kRanks, {});
    begin_backward(moment);
    const auto dies_after = dice_.once_in(8) ? dice_.roll(visits_.size() + 1) : visits_.size();
    for (size_t i = 0; i < dies_after; ++i) {
      const auto number = visits_.size() - 1 - i;
      const auto& visit = visits_[number];
      use(visit.unit, visit.is_seen_to_end ? Keep::outer_and_inner : Keep::outer, moment);
      if (!is_last_visit(number)) continue;
      for (const auto unit : call(visit.unit)) everyone([&](OrderRank& rank) { bring(rank, unit, moment); });
    }
    visits_.size() > dies_after ? die() : end();
    everyone([](OrderRank& rank) { rank.backward_is_over(); });
    visits_.clear();
  }

  void end() {
    const bool publishes = !dice_.once_in(4);
    everyone([&](OrderRank& rank) { rank.order.end_backward(publishes, rank); });
  }

  // Ranks compare how far they came, and a difference is an error.
  void die() {
    everyone([](OrderRank& rank) { rank.order.start_ready_sums(rank); });
    const auto differs = [&](const OrderRank& rank) { return rank.order.started() != ranks_.front().order.started(); };
    is_told_ = std::any_of(ranks_.begin(), ranks_.end(), differs);
    everyone([](OrderRank& rank) { rank.order.forget_backward(rank); });
  }

  // In any order, and some are undefined in the end.
  void bring(OrderRank& rank, UnitId unit, Order::Moment moment) {
    const auto first = rank.own.roll(kParameters);
    for (size_t i = 0; i < kParameters; ++i) {
      const auto parameter = (first + i) % kParameters;
      if (!expected(rank).contains({unit, parameter})) continue;
      const bool defined = is_first({unit, parameter}) || !rank.own.once_in(8);
      if (rank.order.is_entered_by_gradients(unit)) rank.enter(unit, Keep::outer, moment);
      if (defined) {
        rank.order.gradient_arrived(unit, parameter, moment, rank);
      } else {
        rank.order.no_gradient(unit, parameter, moment);
      }
    }
  }

  Dice dice_;
  size_t units_;
  bool in_stream_;
  std::vector<OrderRank> ranks_;
  std::vector<std::optional<UnitId>> outer_;
  /// Of forwards whose gradients are still to come.
  std::vector<Visit> visits_;
  std::vector<Parameters> expected_;
  int next_backward_ = 1;
  bool is_told_ = false;
  size_t events_ = 0;
};

} // namespace

TEST_CASE("order: ranks issue the same, whatever they may do in ways of their own", "[order]") {
  constexpr uint64_t kPrograms = 200000;
  size_t events = 0;
  size_t most_sums = 0;
  for (uint64_t seed = 1; seed <= kPrograms; ++seed) {
    Program program(seed);
    program.run();
    events += program.events();
    most_sums = std::max(most_sums, program.most_sums());
    const auto broken = program.broken();
    if (!broken.empty()) FAIL("program " << seed << ": " << broken);
  }
  CHECK(events > 10 * kPrograms);
  CHECK(most_sums == 3);
}

TEST_CASE("order: what the user gathered and only some ranks used is not gathered ahead", "[order]") {
  enum : UnitId { a, b, c, outermost };
  const Order::Moment moment{.backward = -1, .with_gradients = true};
  std::vector<OrderRank> ranks;
  for (uint64_t rank = 0; rank < kRanks; ++rank) {
    auto& made = ranks.emplace_back(4, rank);
    for (const auto unit : {a, b, c}) made.order.add(static_cast<int64_t>(unit), {}, outermost);
    made.order.add(outermost, {}, std::nullopt);
    for (const auto unit : {outermost, a, b, c, a, b}) made.enter(unit, Keep::outer, moment);
    made.order.leave(outermost, /*exactly=*/false, made);
    made.by_hand(b);
    made.perform({Kind::gather, b});
    made.enter(outermost, Keep::outer, moment);
    made.enter(a, Keep::outer, moment);
    if (rank == 0) made.enter(b, Keep::outer, moment);
    made.enter(c, Keep::outer, moment);
    // What followed here in the last forward is freed on the one rank, and still there on the other.
    made.enter(a, Keep::outer, moment);
    CHECK(made.full(b) == (rank == 0 ? OrderRank::Full::freed : OrderRank::Full::there));
    CHECK(made.broken.empty());
  }
  CHECK(ranks[0].gathers == ranks[1].gathers);
}

TEST_CASE("order: a backward within a forward leaves units there whose forward runs", "[order]") {
  enum : UnitId { inner, head, outermost };
  const Order::Moment forward{.backward = -1, .with_gradients = true};
  OrderRank rank(3, 0);
  for (const auto unit : {inner, head}) rank.order.add(static_cast<int64_t>(unit), {}, outermost);
  rank.order.add(outermost, {}, std::nullopt);
  rank.enter(outermost, Keep::all_to_end, forward);
  rank.enter(inner, Keep::all_to_end, forward);
  rank.order.leave(inner, /*exactly=*/true, rank);
  rank.enter(head, Keep::all_to_end, forward);
  rank.order.begin_backward(5, rank);
  rank.order.expect(inner, 0);
  rank.enter(inner, Keep::outer, {.backward = 5, .with_gradients = false});
  CHECK(rank.full(head) == OrderRank::Full::there);
  rank.order.gradient_arrived(inner, 0, {.backward = 5, .with_gradients = false}, rank);
  rank.order.end_backward(true, rank);
  CHECK(rank.full(inner) == OrderRank::Full::freed);
  CHECK(rank.full(head) == OrderRank::Full::there);
  CHECK(rank.full(outermost) == OrderRank::Full::there);
  rank.order.leave(head, /*exactly=*/true, rank);
  CHECK(rank.full(head) == OrderRank::Full::freed);
  // One that failed is over.
  rank.enter(head, Keep::all_to_end, forward);
  rank.order.fail_forward(head);
  rank.order.fail_forward(outermost);
  rank.order.begin_backward(6, rank);
  rank.order.end_backward(true, rank);
  CHECK(rank.full(head) == OrderRank::Full::freed);
  CHECK(rank.full(outermost) == OrderRank::Full::freed);
}
