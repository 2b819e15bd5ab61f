#pragma once

#include "engine/pass_order.h"

#include <shardwise/detail/export.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace shardwise::engine {

/// Which other units stay open when a unit is entered. Units around it always do. `all_to_end`: every unit, and the
/// entered one until its forward ends.
enum class Keep : uint8_t { outer, outer_and_inner, all, all_to_end };

/// The settings of a unit that decide when things happen.
struct UnitTiming {
  /// Unset: yes for all but the outermost unit.
  std::optional<bool> reshard_after_forward = std::nullopt;
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  /// Its full parameters come from other ranks. If they do not, ranks may make them a different number of times.
  bool is_gathered = true;
  /// It takes part in the sums of each backward that reaches its tree, even if it was not used.
  bool always_sums = false;
  /// A device runs its sums in a stream, where later work waits for them implicitly. So they start only at points that
  /// all ranks share: once the unit was closed after its last use, not as soon as this rank's gradients are there,
  /// since other ranks may wait for more.
  bool sums_in_stream = false;
  /// It has those parameters of a call that are on another mesh than the rest, which the unit around it has. The two
  /// are entered, closed and gathered ahead as one. Read when the unit joins the tree.
  bool is_companion = false;
  /// It has the parameters of several modules, between which others may run. In backward it stays open until it was
  /// used as often as in the forward; consecutive uses count once. (The gradients still to come may differ between
  /// ranks, so they do not decide.)
  bool has_several_modules = false;
  /// How many sums may be under way at a time. The highest number of any unit in the tree applies.
  size_t sums_in_flight = 1;
  /// The user named the units to gather while this one computes.
  bool has_forward_list = false;
  bool has_backward_list = false;
};

/// What an order asks a rank to do with a unit.
struct Action {
  enum class Kind : uint8_t {
    /// Returns when the full parameters are there. The answer says whether there was anything to wait for.
    gather,
    gather_ahead,
    /// Starts to gather the units that the user named for this one.
    gather_list,
    /// Outside of a backward, this rank's larger part stays, if the unit has one (see ReshardAfterForward).
    free,
    start_sum,
    /// The answer says whether wait_sum would return at once. If the sum has a second part, this starts it once the
    /// first is done.
    poll_sum,
    /// Waits until the sum needs nothing more from this rank to finish.
    finish_first_sum,
    wait_sum,
    /// Makes the gradients visible in .grad.
    publish,
    /// No other sum follows for what was published.
    run_hooks,
    /// The backward failed: its gradients are dropped.
    forget_backward
  };
  Kind kind;
  UnitId unit;
  /// It belongs to a backward.
  bool backward = false;
};

/// Carries out what an order asks for.
class Performer {
 public:
  virtual ~Performer() = default;
  /// The result is the answer to `gather` and `poll_sum`; for others it means nothing.
  virtual bool perform(Action action) = 0;
};

/// Says when things happen in a tree of units: one unit and all those below it. It knows no tensors, no process groups
/// and no clock: events come in, actions go out, and it learns only what the actions return.
///
/// Full parameters: a unit is entered at the first use of one of its own parameters, or when its module is seen to
/// begin. It is closed when a unit that is not below it is entered, when the module of an outer unit (its own, for the
/// outermost) is seen to end, and at the end of a backward, unless that runs within its forward. A backward inside
/// another one closes no unit that the other uses. The unit's timing says whether closing frees it. Uses are not
/// counted: ranks may run a unit a different number of times in a row.
///
/// While a unit computes, the unit that was gathered after it in the last pass of the same kind is gathered ahead,
/// unless the user named others. A pass is a forward with gradients to come, a forward without, or a backward. A unit
/// that the user gathered by hand does not count, since some ranks may not use it; the outermost one does, since every
/// rank uses it.
///
/// Gradients: a backward begins by saying which parameters will get one. A unit is summed when all its gradients are
/// there and all units before it had their turn. That order is the same on every rank and follows from the tree alone:
/// inner units before outer ones, later-made ones first. One sum is under way at a time, unless more are allowed; the
/// next one starts at the first event after the oldest is done. (In a stream a sum counts as done at once, but starts
/// only after the unit's last use: see UnitTiming::sums_in_stream.) What is left follows at the end, where all
/// gradients are published.
class SHARDWISE_API Order {
 public:
  /// When something happens: in which autograd backward (-1: in none), and whether what is computed will get gradients.
  struct Moment {
    int backward = -1;
    bool with_gradients = true;
    bool operator==(const Moment&) const = default;
  };

  // The tree.
  /// Of two units, the one that was made first has the lower `number`.
  UnitId add(int64_t number, const UnitTiming& timing = {}, std::optional<UnitId> outer = std::nullopt);
  /// Moves all units of `other` below `outer`. Their ids grow by the number that is returned. `other` must have
  /// no unfinished sums.
  UnitId absorb(const Order& other, UnitId outer);
  void remove(UnitId unit);
  UnitTiming& timing(UnitId unit) {
    return units_[unit].timing;
  }
  bool lies_below(UnitId unit, UnitId other) const;
  /// The companions of this unit: see UnitTiming::is_companion.
  const std::vector<UnitId>& companions(UnitId unit) const {
    return units_[unit].companions;
  }
  /// The unit around a companion; for any other unit, the unit itself.
  UnitId head(UnitId unit) const {
    return units_[unit].head;
  }
  bool reshards_after_forward(UnitId unit) const {
    const auto& node = units_[unit];
    return node.timing.reshard_after_forward.value_or(units_[node.head].outer.has_value());
  }
  /// The living units, in the order of sums.
  const std::vector<UnitId>& sums() const {
    return sums_;
  }
  /// The living units, in the order in which they were made.
  const std::vector<UnitId>& made() const {
    return made_;
  }

  // Full parameters. What applies to a unit here applies to all units made by the same call.
  /// Gathers the unit, and closes the others that `keep` does not name.
  void enter(UnitId unit, Keep keep, Moment moment, Performer& rank);
  /// Another use of an open unit, for example by another of its modules. enter() counts its own.
  void count_use(UnitId unit, Moment moment);
  /// Whether the last event here was this same enter(), in the same backward or forward: another one would change
  /// nothing, unless the unit was changed meanwhile.
  bool is_in(UnitId unit, Keep keep, Moment moment, Performer& rank);
  /// The unit's module ended its forward. `exactly`: every end of it is seen, so that this closes the unit too.
  void leave(UnitId unit, bool exactly, Performer& rank);
  /// The unit's forward failed. It stays open until something else closes it.
  void fail_forward(UnitId unit) {
    const auto head = units_[unit].head;
    units_[head].in_forward = false;
    for (const auto companion : units_[head].companions) units_[companion].in_forward = false;
  }
  void gathered_by_hand(UnitId unit) {
    units_[unit].by_hand = forwards_;
  }

  // A backward, from its first event here on. A backward inside it, such as a checkpoint's, is part of it: its
  // gradients are summed after the outer one's, which began without it.
  bool in_backward() const {
    return backward_ != kNone;
  }
  /// Whether this moment's backward is not the one that began here.
  bool is_inside_another(Moment moment) const {
    return backward_ != moment.backward;
  }
  /// Must be followed by expect() for each gradient that the backward will bring.
  void begin_backward(int backward, Performer& rank);
  /// A gradient of this parameter will come.
  void expect(UnitId unit, size_t parameter);
  /// The unit takes part, whatever this backward brings: on some rank, gradients of earlier backwards wait for their
  /// sum.
  void engage(UnitId unit) {
    units_[unit].engaged = units_[unit].sums = true;
  }
  /// Whether the running backward starts sums only at points that all ranks share (see UnitTiming::sums_in_stream):
  /// then they may share a process group with gathers.
  bool starts_sums_alike() const {
    return sums_in_stream_;
  }
  /// Whether sums wait for the end of the backward.
  void set_late(bool late) {
    late_ = late;
  }
  int64_t missing(UnitId unit) const {
    return units_[unit].missing;
  }
  /// Whether this unit is summed at the end of the backward.
  bool takes_part(UnitId unit) const;
  /// Units to which backwards inside the running one brought gradients, in the order of sums.
  std::vector<UnitId> reached_inside() const;
  /// Whether a gradient that arrives now should enter the unit: the backward has not used it before.
  bool is_entered_by_gradients(UnitId unit) const {
    return !units_[unit].entered && units_[unit].timing.unshard_in_backward;
  }
  /// The expected gradient does not come after all.
  void no_gradient(UnitId unit, size_t parameter, Moment moment) {
    note(unit, parameter, moment);
  }
  void gradient_arrived(UnitId unit, size_t parameter, Moment moment, Performer& rank);
  /// A gradient is about to arrive: whether the next sum to start is this unit's, and needs to wait for no other.
  bool is_next(UnitId unit, Moment moment, Performer& rank);
  /// Ends a backward that brought gradients. Unless it publishes them, sums may stay under way; finish_sums() publishes
  /// them, at the latest when the next backward begins here.
  void end_backward(bool publishes, Performer& rank);
  /// Must be followed by end_backward(): sums what earlier backwards left for later, without a backward.
  void begin_pending(Performer& rank);
  /// The same for these units alone.
  void begin_pending(const std::vector<UnitId>& units, Performer& rank);
  /// Publishes what a backward left.
  void finish_sums(Performer& rank);
  /// Whether it has something to publish.
  bool has_unfinished_sums() const {
    return !unfinished_.empty();
  }

  /// How many sums this rank has started or can start.
  size_t ready() const;

  // Failures.
  /// The backward dies on every rank: starts the sums that all ranks can start, so that no rank waits alone in one. The
  /// ranks then compare started(): one that expected fewer gradients may be further ahead.
  void start_ready_sums(Performer& rank);
  size_t started() const {
    return launched_;
  }
  /// Ends a backward that failed, or that brought no gradient. Units that were used still take part in the next one.
  void forget_backward(Performer& rank);
  /// Does the same outside of a backward, and frees every unit whatever its timing.
  void reset(Performer& rank);
  /// Does the same, and forgets what a backward left unpublished instead of publishing it first.
  void reset_all(Performer& rank);

  /// Whether units are gathered ahead as the last pass used them.
  bool prefetches = true;

 private:
  static constexpr int kNone = -1;
  struct Node {
    int64_t number = 0;
    std::optional<UnitId> outer;
    bool alive = true;
    UnitTiming timing;
    UnitId head = 0;
    std::vector<UnitId> companions = {};
    /// How many forwards had ended when the user gathered it by hand.
    int64_t by_hand = -1;
    /// Its forward runs, and its end will be seen. (If it has several modules, some may never run.)
    bool in_forward = false;
    /// While it is open: the first backward that used it, among the running one and those inside it.
    int used_in = kNone;
    /// The running backward has used this unit: at all (in a forward that it repeats or for gradients); for gradients.
    bool entered = false;
    bool used_in_backward = false;
    /// The unit was used, with gradients to come, since the last backward ended.
    bool engaged = false;
    /// The running backward sums it, as known when that began.
    bool sums = false;
    /// A backward inside the running one brought it a gradient that is not summed yet.
    bool reached_inside = false;
    /// The number of a forward with gradients to come; the unit's uses in it; how many of those the backward has yet to
    /// reach.
    int64_t forward = -1;
    int64_t uses = 0;
    int64_t uses_to_come = 0;
    /// The same for all forwards since the last backward, if they are more: its sum in a stream waits for them.
    int64_t uses_since = 0;
    int64_t uses_before_sum = 0;
    /// Parameters whose gradient is still to come: how many, and which.
    int64_t missing = 0;
    std::vector<bool> awaited = {};
  };
  struct Entered {
    UnitId unit;
    Keep keep;
    Moment moment;
    bool operator==(const Entered&) const = default;
  };

  void sort();
  void find_companions();
  void append(UnitId unit, const std::vector<std::vector<UnitId>>& inner);
  bool is_by_hand(UnitId unit) const {
    return units_[unit].by_hand == forwards_;
  }
  bool stays(UnitId other, UnitId entered, Keep keep, int backward) const;
  bool is_gathered(UnitId head) const;
  template <typename Condition>
  void close_all(const Condition& goes, bool backward, Performer& rank);
  void free_all(Performer& rank);
  void prefetch(UnitId unit, bool gathered, Moment moment, Performer& rank);
  bool in_forward() const;
  void end_forwards();
  void note(UnitId unit, size_t parameter, Moment moment);
  void advance(Moment moment, Performer& rank);
  template <typename Condition>
  void start_sums(const Condition& may_start, Performer& rank);
  bool has_room(Performer& rank);
  bool is_seen_in_backward(UnitId head) const;
  bool is_over(UnitId unit) const;
  void launch(UnitId unit, Performer& rank);

  std::vector<Node> units_;
  std::vector<UnitId> sums_;
  /// The living units, in the order in which they were made.
  std::vector<UnitId> made_;
  /// Entered and not closed.
  std::vector<UnitId> open_;
  /// What was entered last; unset if units were closed since.
  std::optional<Entered> last_;
  /// What was entered last in this forward or backward, even if it was closed since.
  std::optional<UnitId> before_;
  /// How many forwards ended.
  int64_t forwards_ = 0;
  PassOrder training_;
  PassOrder inference_;
  PassOrder backwards_;

  int backward_ = kNone;
  size_t launched_ = 0;
  /// The backward brought a gradient. One that brings none, such as one for the inputs alone, sums nothing.
  bool reached_ = false;
  bool late_ = false;
  /// The units whose sums are under way, the oldest first, and how many there may be in the running backward.
  std::vector<UnitId> in_flight_;
  size_t most_in_flight_ = 1;
  /// Sums run in a stream and units are gathered, so ranks could wait in a circle.
  bool sums_in_stream_ = false;
  /// Units whose backward ended, but whose gradients are not published yet.
  std::vector<UnitId> unfinished_;
};

} // namespace shardwise::engine
