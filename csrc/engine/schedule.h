#pragma once

#include "base/forked.h"
#include "comm/collectives/buffers.h"
#include "engine/order.h"
#include "engine/turn.h"
#include "group/gradients.h"

#include <shardwise/detail/export.h>

#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace shardwise::engine {

class BackwardWatch;
class Unit;

/// Carries out what the order of a tree says on the tree's units: one unit and all those below it. Tells the order what
/// happens: which unit is used, in which backward, and which gradients that will bring.
///
/// One thread at a time may use it, and during a backward autograd's device threads. If no unit's visible tensors
/// change, others may read meanwhile.
class SHARDWISE_API Schedule final : public std::enable_shared_from_this<Schedule>, private Performer {
 public:
  explicit Schedule(int64_t number) : number_(number) {}

  comm::Buffers& buffers() {
    return *buffers_;
  }
  /// Uses the buffers of the other tree from now on.
  void share_buffers(const Schedule& other) {
    buffers_ = other.buffers_;
  }
  group::Gradients::Streams& sum_streams() {
    return sum_streams_;
  }
  int64_t number() const {
    return number_;
  }
  /// Adds the first unit. take_over() adds all others.
  void add(const std::shared_ptr<Unit>& unit, const UnitTiming& timing);
  /// Moves all units of `other` below `outer`, a unit of this tree.
  void take_over(Schedule& other, const Unit& outer);
  void remove(const Unit& unit);
  /// The living units, in the order in which they were made.
  std::vector<std::shared_ptr<Unit>> units() const;
  /// The unit and its companions.
  std::vector<std::shared_ptr<Unit>> call(const Unit& unit) const;
  Order& order() {
    return order_;
  }
  /// Whether this unit is summed at the end of the running backward.
  bool takes_part(const Unit& unit) const;
  /// Must be held while a unit whose visible tensors change is used, outside of a backward.
  Turn& turn() {
    return turn_;
  }

  // What front ends announce.
  /// A full copy is about to be used, or the module begins.
  void enter(Unit& unit, Keep keep = Keep::outer);
  /// Another of its modules begins its forward; the unit has been open since the first one.
  void come_back(Unit& unit);
  static Order::Moment now();
  /// Whether enter() would change nothing now, unless the unit was changed meanwhile.
  bool is_in(const Unit& unit, Keep keep, Order::Moment moment);
  /// The module ended. `exactly`: this is seen each time it runs, so that the unit is closed.
  void leave(Unit& unit, bool exactly = false);
  /// The module failed in its forward, which was entered with Keep::all_to_end.
  void fail_forward(Unit& unit);
  /// Starts a gather that the user asked for. finish_unshard() of the unit waits for it.
  void begin_unshard_by_hand(Unit& unit);
  /// Calls await_event and clears it.
  void await_optimizer();
  /// Calls await_event, and leaves it to the next forward, which may be on another stream.
  void follow_optimizer() const {
    if (await_event) await_event();
  }

  void gradient_arriving(Unit& unit, const group::Parameter& parameter, bool defined);
  /// Whether autograd now runs another backward than the one whose gradients are summed.
  bool is_inside_another() const;
  void gradient_arrived(Unit& unit, const group::Parameter& parameter);
  /// The end of a backward that brought gradients to this tree. Unless it runs post-accumulate hooks, run_hooks() or
  /// forget_hooks() follows.
  void end_backward(bool runs_hooks = true);
  void run_hooks();
  void forget_hooks();
  /// Sums what backwards without synchronisation left, as the end of a backward with it would. Called outside of a
  /// backward, for programs that run backward in pieces.
  void reduce_pending();
  /// Publishes what a backward left.
  void finish_sums();
  /// A backward died before its end.
  void abandon_backward() noexcept;
  /// A graph captures what units do. From then on what a forward without gradients leaves is not trusted in the next
  /// one: replays may change the shards meanwhile, which nobody sees.
  void note_capture() {
    was_captured_ = true;
  }
  /// Whether this thread is the one that last ran a forward here.
  bool belongs_to_this_thread() const {
    return thread_ == std::this_thread::get_id();
  }
  /// Whether backwards here may run on autograd's threads.
  bool is_on_device() const;
  /// Ends a backward that failed, or that brought no gradient. Units that were used still take part in the next one.
  void forget_backward();
  /// Does the same outside of a backward, and reshards every unit whatever its options.
  void reset();
  /// Does the same, and drops all gradients that are not in .grad yet: sums under way, and what backwards without
  /// synchronisation left.
  void reset_iteration();

  // For programs that say when a backward is over: until then, backwards leave their gradients unpublished.

  /// Raises Error while gradients are left.
  void set_finalized_by_hand(bool value);
  /// Starts the sums of all that is left. Returns its number, for wait_for_finalization(). Raises Error if finalization
  /// by hand is off, in a backward, and before the last one was waited for.
  int64_t finalize();
  /// Publishes them. Raises Error if the iteration was reset since.
  void wait_for_finalization(int64_t number);

  /// Makes the device wait for what the next forward needs, such as the optimizer's step.
  std::function<void()> await_event;

 private:
  class Event;
  bool is_dead() const;
  void sum_reached_inside(const std::vector<UnitId>& reached);
  class Expectation;
  std::vector<std::shared_ptr<Unit>> in_order_of_sums() const;
  /// Cleans up after a backward that died. Returns whether another thread runs one; with full copies, that is an Error.
  bool another_runs_backward(const std::string& unit = "");
  void need_no_other_backward();
  void join_backward();
  /// A backward of another tree begins inside this tree's: makes this rank start as many sums as the others.
  void let_in_another();
  void join(const Expectation& expectation, bool another_is_first);

  bool perform(Action action) override;
  void distrust_copies();
  void gather_list(const Unit& unit, bool backward);

  int64_t number_;
  /// See Unit::visible_tensors_change().
  bool is_for_one_ = false;
  Turn turn_;
  /// For trees that several threads may use.
  std::recursive_mutex events_;
  /// The threads that last ran a forward, and began a backward.
  std::thread::id thread_ = std::this_thread::get_id();
  std::thread::id backward_thread_;
  int backward_thread_number_ = 0;
  std::shared_ptr<comm::Buffers> buffers_ = std::make_shared<comm::Buffers>();
  group::Gradients::Streams sum_streams_;
  Order order_;
  /// Indexed by their ids in the order.
  std::vector<std::weak_ptr<Unit>> units_;
  /// The same as plain pointers; null once a unit is gone.
  std::vector<Unit*> living_;
  bool was_captured_ = false;
  bool finalized_by_hand_ = false;
  bool hooks_wait_ = false;
  int64_t finalizations_ = 0;
  /// The finalization that was not waited for yet.
  std::optional<int64_t> finalizing_;
  std::weak_ptr<BackwardWatch> watch_;
  /// Whether the running backward brought a gradient.
  bool is_reached_ = false;
  /// The thread that ran a forward or a backward may not exist there.
  base::InForkedChild in_child_{[this] {
    turn_.drop();
    watch_.reset();
  }};
  /// Keeps the units of the running backward alive until its end.
  std::vector<std::shared_ptr<Unit>> in_backward_;
};

} // namespace shardwise::engine
