#pragma once

#include "comm/buffers.h"
#include "engine/use_order.h"

#include <c10/core/Event.h>

#include <memory>
#include <vector>

namespace shardwise::group {
class Parameter;
}

namespace shardwise::engine {

class BackwardWatch;
class Unit;

/// Which other units stay open where one is entered. Those that it lies below always do.
enum class Keep : uint8_t { outer, outer_and_inner, all };

/// When things happen in a tree of units: one unit and all those below it.
///
/// Full copies: a unit is entered at the first use of a parameter of its own, or where its module is seen to begin. It
/// is closed when a unit that does not lie below it is entered, where the module of an outer unit is seen to end (its
/// own if it is the outermost), and at the end of a backward; its options say whether it is then resharded. Never a
/// count: ranks may run a unit a different number of times in a row.
///
/// The unit that was gathered next in the last pass of its kind is on its way while one computes, unless the unit has a
/// list of its own. A pass is a forward with gradients to come, one without, or a backward. What the user gathered
/// himself is left out, for not every rank need use it; but every rank uses the outermost unit.
///
/// Gradients: at its first event a backward asks autograd which parameters will get one. A unit whose gradients are
/// all there is reduced, but only after those before it in an order that is the same on every rank and follows from
/// the tree alone: inner units before outer ones, and those made later first. One sum is under way at a time; the next
/// one starts at the next event after it is done. The rest follows at the end, where all gradients are published.
///
/// Belongs to the thread that trains; autograd's device threads may call in one at a time.
class Schedule : public std::enable_shared_from_this<Schedule> {
 public:
  explicit Schedule(int64_t number) : number_(number) {}

  comm::Buffers& buffers() {
    return *buffers_;
  }
  /// Takes those of the other tree from now on.
  void share_buffers(const Schedule& other) {
    buffers_ = other.buffers_;
  }
  int64_t number() const {
    return number_;
  }
  void add(const std::shared_ptr<Unit>& unit);
  /// All of the other's units are of this tree from now on.
  void take_over(Schedule& other);
  /// The units that are alive, in the order in which they were made.
  std::vector<std::shared_ptr<Unit>> units() const;

  /// The unit's full copies are there when this returns; others are closed.
  void enter(Unit& unit, Keep keep = Keep::outer);
  /// Gathers the unit for the user. finish_unshard() of the unit waits for it.
  void begin_unshard_by_hand(Unit& unit);
  /// Whether this was the last thing that happened to units here, in the same backward or forward: another enter()
  /// would change nothing, unless somebody changed the unit.
  bool is_in(const Unit& unit, Keep keep);
  /// Calls await_event, which is of no more use then.
  void await_optimizer();
  /// The unit's module ended its forward; `exactly` if that is seen each time, so that the unit is closed too.
  void leave(Unit& unit, bool exactly);

  void gradient_arriving(Unit& unit, group::Parameter& parameter, bool defined);
  void gradient_arrived(Unit& unit, group::Parameter& parameter);
  /// The end of a backward that brought gradients to this tree.
  void end_backward();
  /// Sums what backwards without synchronisation left, as the end of a backward with it would. Outside of a backward;
  /// for those who run backward in pieces.
  void reduce_pending();
  /// A backward died in the middle.
  void abandon_backward() noexcept;
  /// The end of a backward that failed, or that brought none. Units that were used still take part in the next one.
  void forget_backward();
  /// The same outside of a backward, and every unit is resharded whatever its options.
  void reset();

  /// Whether units are gathered ahead as the last pass used them.
  bool prefetches = true;
  /// Lets the device come to where it has to be before the next forward.
  std::function<void()> await_event;
  /// If not, the end of a backward leaves sums under way; the next backward that comes here publishes them first.
  bool is_last_backward = true;

 private:
  std::vector<std::shared_ptr<Unit>> reduce_order() const;
  class Expectation;
  void join_backward();
  void join(const Expectation& expectation, bool another_is_first);
  void settle();
  void note(Unit& unit, group::Parameter& parameter);
  void advance();
  /// Those whose gradients are there, in their order, up to the first that may not start.
  template <typename Condition>
  void start_sums(const Condition& may_start);
  void launch(Unit& unit);
  void prefetch(Unit& unit, bool gathered, bool backward);
  static void begin_unshard_ahead(Unit& unit, bool backward);
  bool is_by_hand(const Unit& unit) const;
  void end_forwards();
  void close(Unit& unit, bool backward);
  void close_all();

  int64_t number_;
  std::shared_ptr<comm::Buffers> buffers_ = std::make_shared<comm::Buffers>();
  std::vector<std::weak_ptr<Unit>> units_;
  /// Entered and not closed. They take themselves out when they die.
  std::vector<Unit*> open_;
  friend class Unit;

  /// What was entered last, and in what; nothing when units were closed since.
  struct Entered {
    const Unit* unit = nullptr;
    Keep keep = Keep::outer;
    int backward = -1;
    bool with_gradients = false;
    bool operator==(const Entered&) const = default;
  };
  static Entered entered_now(const Unit& unit, Keep keep);
  Entered last_;

  /// How many forwards ended.
  int64_t forwards_ = 0;
  UseOrder training_;
  UseOrder inference_;
  UseOrder backwards_;

  /// The backward that came here, and that the flags of the parameters speak of; -1 when there is none. One inside of
  /// it, as of a checkpoint, is part of it.
  int backward_ = -1;
  std::weak_ptr<BackwardWatch> watch_;
  std::vector<std::shared_ptr<Unit>> order_;
  size_t launched_ = 0;
  /// It brought a gradient: one that brings none, as for the inputs alone, sums nothing.
  bool reached_ = false;
  /// Sums wait for the end of the backward.
  bool late_ = false;
  /// The unit whose sum is under way.
  std::weak_ptr<Unit> in_flight_;
  /// Units of a backward that ended and whose gradients are not published. The model may be deleted before they are.
  std::vector<std::weak_ptr<Unit>> unsettled_;
};

} // namespace shardwise::engine
