#pragma once

#include "engine/pass_order.h"

#include <shardwise/export.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::engine {

/// Which other units stay open where one is entered. Those that it lies below always do.
enum class Keep : uint8_t { outer, outer_and_inner, all };

/// A unit among those of its tree.
using UnitId = size_t;

/// What is decided about a unit, as far as it changes when something happens.
struct UnitTiming {
  /// Unset: all but the outermost unit do.
  std::optional<bool> reshard_after_forward = std::nullopt;
  bool reshard_after_backward = true;
  bool unshard_in_backward = true;
  /// Full parameters come from other ranks. Where they do not, what one rank does more often than others is no matter.
  bool is_gathered = true;
  /// Takes part in the sums of each backward that comes to its tree, whether it was used or not.
  bool always_sums = false;
  /// It has the parameters of several modules, between which others may run. In backward it stays open until it was
  /// used as often as in the forward; uses in a row count once. (Which gradients are still to come may differ between
  /// ranks.)
  bool has_several_modules = false;
  /// The user named what is gathered while this unit computes.
  bool has_forward_list = false;
  bool has_backward_list = false;

  bool operator==(const UnitTiming&) const = default;
};

/// What a rank does when something happened to its units.
class OrderActions {
 public:
  virtual ~OrderActions() = default;
  /// Full parameters are there when this returns. Returns whether there was something to wait for.
  virtual bool gather(UnitId unit) = 0;
  virtual void gather_ahead(UnitId unit, bool backward) = 0;
  /// Those that the user named for this unit.
  virtual void gather_list(UnitId unit, bool backward) = 0;
  /// `hold`: keeps what fewer ranks hold together after forward, if there is such a thing.
  virtual void free(UnitId unit, bool hold) = 0;
  virtual void start_sum(UnitId unit) = 0;
  /// Whether wait_sum() would return at once. Where a sum has a second part, this starts it once the first is done.
  virtual bool sum_is_done(UnitId unit) = 0;
  /// Waits for what needs an event of this rank.
  virtual void finish_first_sum(UnitId unit) = 0;
  virtual void wait_sum(UnitId unit) = 0;
  /// Gradients become visible.
  virtual void publish(UnitId unit) = 0;
  virtual void end_backward(UnitId unit) = 0;
  /// The backward failed: its gradients are dropped.
  virtual void forget_backward(UnitId unit) = 0;
};

/// When things happen in a tree of units: one unit and all those below it. Knows no tensors, no process groups and no
/// clock: events come in, actions go out, and what an action answers is all that it learns of the world.
///
/// Full parameters: a unit is entered at the first use of a parameter of its own, or where its module is seen to begin.
/// It is closed when a unit that does not lie below it is entered, where the module of an outer unit is seen to end
/// (its own if it is the outermost), and at the end of a backward; its timing says whether it is then freed. Uses are
/// not counted: ranks may run a unit a different number of times in a row.
///
/// The unit that was gathered next in the last pass of its kind is on its way while one computes, unless the user named
/// others. A pass is a forward with gradients to come, one without, or a backward. What the user gathered himself is
/// left out, for not every rank need use it; but every rank uses the outermost unit.
///
/// Gradients: a backward begins with the parameters that will get one. A unit whose gradients are all there is summed,
/// but only after those before it in an order that is the same on every rank and follows from the tree alone: inner
/// units before outer ones, and those made later first. One sum is under way at a time; the next one starts at the next
/// event after it is done. The rest follows at the end, where all gradients are published.
class SHARDWISE_API Order {
 public:
  /// Something happens inside of this backward of autograd's (-1: of none), and computes something that gradients are
  /// to come to, or not.
  struct Moment {
    int backward = -1;
    bool with_gradients = true;
    bool operator==(const Moment&) const = default;
  };

  // The tree.
  /// `number` tells which of two units was made first.
  UnitId add(int64_t number, const UnitTiming& timing = {}, std::optional<UnitId> outer = std::nullopt);
  /// All of the other's units lie below `outer` from now on. Their ids grow by what is returned. The other one must
  /// have settled.
  UnitId absorb(const Order& other, UnitId outer);
  void remove(UnitId unit);
  UnitTiming& timing(UnitId unit) {
    return units_[unit].timing;
  }
  bool lies_below(UnitId unit, UnitId other) const;
  bool reshards_after_forward(UnitId unit) const {
    return units_[unit].timing.reshard_after_forward.value_or(units_[unit].outer.has_value());
  }
  /// The order of sums: of all units that are there.
  const std::vector<UnitId>& sums() const {
    return sums_;
  }
  /// The units that are there, as they were made.
  const std::vector<UnitId>& made() const {
    return made_;
  }

  // Full parameters.
  /// The unit's are there when this returns; others are closed.
  void enter(UnitId unit, Keep keep, Moment moment, OrderActions& act);
  /// A use of a unit that is open, as by another of its modules. enter() counts its own.
  void count_use(UnitId unit, Moment moment);
  /// Whether this was the last thing that happened to units here, in the same backward or forward: enter() would change
  /// nothing, unless somebody changed the unit.
  bool is_in(UnitId unit, Keep keep, Moment moment, OrderActions& act);
  /// The unit's module ended its forward; `exactly` if that is seen each time, so that the unit is closed too.
  void leave(UnitId unit, bool exactly, OrderActions& act);
  void gathered_by_hand(UnitId unit) {
    units_[unit].by_hand = forwards_;
  }

  // A backward, from its first event here. One inside of it, as of a checkpoint, is part of it.
  bool in_backward() const {
    return backward_ != kNone;
  }
  /// What it will bring is told next.
  void begin_backward(int backward, OrderActions& act);
  /// A gradient of this parameter is to come.
  void expect(UnitId unit, size_t parameter);
  /// The unit takes part, whatever this backward brings: gradients of earlier ones wait for their sum, on any rank.
  void engage(UnitId unit) {
    units_[unit].engaged = true;
  }
  /// Sums wait for the end.
  void set_late(bool late) {
    late_ = late;
  }
  int64_t missing(UnitId unit) const {
    return units_[unit].missing;
  }
  /// Whether this unit sums at the end of the backward.
  bool takes_part(UnitId unit) const;
  /// Whether the first gradient of this unit is the first use of it that the backward shows.
  bool is_entered_by_gradients(UnitId unit) const {
    return !units_[unit].entered && units_[unit].timing.unshard_in_backward;
  }
  /// There is none after all.
  void no_gradient(UnitId unit, size_t parameter, Moment moment) {
    note(unit, parameter, moment);
  }
  void gradient_arrived(UnitId unit, size_t parameter, Moment moment, OrderActions& act);
  /// The end of a backward that brought gradients. If it is not the last one, sums stay under way; the next one that
  /// comes here publishes them first.
  void end_backward(bool is_last, OrderActions& act);
  /// Before an end_backward() without a backward: what earlier ones left for later is summed.
  void begin_pending(OrderActions& act);
  /// Publishes what a backward that was not the last one left.
  void settle(OrderActions& act);

  // What goes wrong.
  /// The backward dies on every rank: sums that all ranks can start are started, so that none is left over. How far
  /// they went is compared next: a rank that waits for fewer gradients may have come further than others.
  void start_what_can(OrderActions& act);
  size_t started() const {
    return launched_;
  }
  /// The end of a backward that failed, or that brought none. Units that were used still take part in the next one.
  void forget_backward(OrderActions& act);
  /// The same outside of a backward, and every unit is freed whatever its timing.
  void reset(OrderActions& act);

  /// Whether units are gathered ahead as the last pass used them.
  bool prefetches = true;

  bool operator==(const Order&) const = default;
  /// What is open, gathered next and summed, for failures of tests.
  std::string describe() const;

 private:
  static constexpr int kNone = -1;
  struct Node {
    int64_t number = 0;
    std::optional<UnitId> outer;
    bool alive = true;
    UnitTiming timing;
    /// The user gathered it after so many forwards.
    int64_t by_hand = -1;
    /// The running backward used this unit already.
    bool entered = false;
    /// The unit was used, with gradients to come, since the last backward ended.
    bool engaged = false;
    /// Uses in the forward of that number, with gradients to come; those that a backward has still to come to.
    int64_t forward = -1;
    int64_t uses = 0;
    int64_t uses_to_come = 0;
    /// Parameters whose gradient is still to come: how many, and which.
    int64_t missing = 0;
    std::vector<bool> awaited = {};
    bool operator==(const Node&) const = default;
  };
  struct Entered {
    UnitId unit;
    Keep keep;
    Moment moment;
    bool operator==(const Entered&) const = default;
  };

  void sort();
  void append(UnitId unit, const std::vector<std::vector<UnitId>>& inner);
  bool is_by_hand(UnitId unit) const {
    return units_[unit].by_hand == forwards_;
  }
  bool stays(UnitId other, UnitId entered, Keep keep, bool backward) const;
  template <typename Condition>
  void close_all(const Condition& goes, bool backward, OrderActions& act);
  void close(UnitId unit, bool backward, OrderActions& act);
  void free_all(OrderActions& act);
  void prefetch(UnitId unit, bool gathered, Moment moment, OrderActions& act);
  void end_forwards();
  void note(UnitId unit, size_t parameter, Moment moment);
  void advance(Moment moment, OrderActions& act);
  template <typename Condition>
  void start_sums(const Condition& may_start, OrderActions& act);
  void launch(UnitId unit, OrderActions& act);

  std::vector<Node> units_;
  std::vector<UnitId> sums_;
  /// Those that are there, as they were made.
  std::vector<UnitId> made_;
  /// Entered and not closed.
  std::vector<UnitId> open_;
  /// What was entered last; nothing when units were closed since.
  std::optional<Entered> last_;
  /// What was entered last in this forward or backward, be it closed since.
  std::optional<UnitId> before_;
  /// How many forwards ended.
  int64_t forwards_ = 0;
  PassOrder<UnitId> training_;
  PassOrder<UnitId> inference_;
  PassOrder<UnitId> backwards_;

  int backward_ = kNone;
  size_t launched_ = 0;
  /// The backward brought a gradient: one that brings none, as for the inputs alone, sums nothing.
  bool reached_ = false;
  bool late_ = false;
  /// The unit whose sum is under way.
  std::optional<UnitId> in_flight_;
  /// Units of a backward that ended, whose gradients are not published.
  std::vector<UnitId> unsettled_;
};

} // namespace shardwise::engine
