#pragma once

#include "comm/buffers.h"
#include "engine/order.h"

#include <functional>
#include <memory>
#include <vector>

namespace shardwise::group {
class Parameter;
}

namespace shardwise::engine {

class BackwardWatch;
class Unit;

/// Carries out what the order of a tree says, on its units: one unit and all those below it. Tells it what happens:
/// which unit is used, in which backward, which gradients it will bring.
///
/// Belongs to the thread that trains; autograd's device threads may call in one at a time.
class Schedule final : public std::enable_shared_from_this<Schedule>, private OrderActions {
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
  /// The first one, which is alone here as long as no other tree is taken over.
  void add(const std::shared_ptr<Unit>& unit, const UnitTiming& timing);
  /// All of the other's units lie below `outer`, which is of this tree, from now on.
  void take_over(Schedule& other, const Unit& outer);
  void remove(const Unit& unit);
  /// The units that are alive, in the order in which they were made.
  std::vector<std::shared_ptr<Unit>> units() const;
  Order& order() {
    return order_;
  }
  /// Whether this unit sums at the end of the running backward.
  bool takes_part(const Unit& unit) const;

  void enter(Unit& unit, Keep keep = Keep::outer);
  /// Another module of a unit that is open begins.
  void come_back(Unit& unit);
  /// Whether enter() would change nothing, unless somebody changed the unit.
  bool is_in(const Unit& unit, Keep keep);
  void leave(const Unit& unit, bool exactly);
  /// Gathers the unit for the user. finish_unshard() of the unit waits for it.
  void begin_unshard_by_hand(Unit& unit);
  /// Calls await_event, which is of no more use then.
  void await_optimizer();

  void gradient_arriving(Unit& unit, const group::Parameter& parameter, bool defined);
  void gradient_arrived(Unit& unit, const group::Parameter& parameter);
  /// The end of a backward that brought gradients to this tree.
  void end_backward();
  /// Sums what backwards without synchronisation left, as the end of a backward with it would. Outside of a backward;
  /// for those who run backward in pieces.
  void reduce_pending();
  /// Publishes what a backward that was not the last one left.
  void settle() {
    order_.settle(*this);
  }
  /// A backward died in the middle.
  void abandon_backward() noexcept;
  /// The end of a backward that failed, or that brought none. Units that were used still take part in the next one.
  void forget_backward();
  /// The same outside of a backward, and every unit is resharded whatever its options.
  void reset();

  /// Lets the device come to where it has to be before the next forward.
  std::function<void()> await_event;
  /// If not, the end of a backward leaves sums under way; the next backward that comes here publishes them first.
  bool is_last_backward = true;

 private:
  class Expectation;
  std::vector<std::shared_ptr<Unit>> in_order_of_sums() const;
  void join_backward();
  void join(const Expectation& expectation, bool another_is_first);

  bool gather(UnitId unit) override;
  void gather_ahead(UnitId unit, bool backward) override;
  void gather_list(UnitId unit, bool backward) override;
  void free(UnitId unit, bool hold) override;
  void start_sum(UnitId unit) override;
  bool sum_is_done(UnitId unit) override;
  void finish_first_sum(UnitId unit) override;
  void wait_sum(UnitId unit) override;
  void publish(UnitId unit) override;
  void end_backward(UnitId unit) override;
  void forget_backward(UnitId unit) override;

  int64_t number_;
  std::shared_ptr<comm::Buffers> buffers_ = std::make_shared<comm::Buffers>();
  Order order_;
  /// By their ids in the order.
  std::vector<std::weak_ptr<Unit>> units_;
  /// The same, while they live.
  std::vector<Unit*> living_;
  std::weak_ptr<BackwardWatch> watch_;
  /// Those of the running backward live until its end.
  std::vector<std::shared_ptr<Unit>> in_backward_;
};

} // namespace shardwise::engine
