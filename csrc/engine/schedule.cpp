#include "engine/schedule.h"

#include "engine/backward_watch.h"
#include "engine/trees.h"
#include "engine/unit.h"
#include "observe/label.h"
#include "observe/record.h"

#include <shardwise/error.h>

#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace shardwise::engine {

namespace autograd = torch::autograd;

/// Knows the leaves to which the running backward will bring a gradient.
class Schedule::Expectation {
 public:
  bool holds(const at::Tensor& leaf) const {
    const auto accumulator = autograd::impl::try_get_grad_accumulator(leaf);
    if (!accumulator || !nodes_->contains(accumulator.get())) return false;
    if (info_ == nullptr || info_->empty()) return true;
    const auto entry = info_->find(accumulator.get());
    return entry != info_->end() && entry->second.should_execute();
  }

 private:
  const std::unordered_set<autograd::Node*>* nodes_ = autograd::get_current_graph_task_nodes_in_graph();
  const std::unordered_map<autograd::Node*, autograd::GraphTask::ExecInfo>* info_ =
      autograd::get_current_graph_task_exec_info();
};

/// An event outside of a backward, in one thread at a time.
class Schedule::Event {
 public:
  Event(Schedule& tree, const Unit& unit) {
    if (BackwardWatch::running()) return;
    if (tree.is_for_one_) {
      tree.turn_.take(unit.name());
      turn_ = &tree.turn_;
    } else {
      lock_ = std::unique_lock(tree.events_);
    }
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() {
    if (turn_ != nullptr) turn_->give();
  }

 private:
  Turn* turn_ = nullptr;
  std::unique_lock<std::recursive_mutex> lock_;
};

Order::Moment Schedule::now() {
  return {.backward = autograd::get_current_graph_task_id(), .with_gradients = c10::GradMode::is_enabled()};
}

void Schedule::add(const std::shared_ptr<Unit>& unit, const UnitTiming& timing) {
  is_for_one_ = is_for_one_ || unit->visible_tensors_change();
  unit->belong_to(shared_from_this(), order_.add(unit->number(), timing));
  units_.push_back(unit);
  living_.push_back(unit.get());
}

// What the other tree still has to publish is published first: nothing would publish it later.
void Schedule::take_over(Schedule& other, const Unit& outer) {
  other.finish_sums();
  is_for_one_ = is_for_one_ || other.is_for_one_;
  const auto first = order_.absorb(other.order_, outer.id());
  for (auto& weak : other.units_) {
    const auto unit = weak.lock();
    if (unit) {
      unit->belong_to(shared_from_this(), first + unit->id());
      add_to_tree(*unit, shared_from_this());
    }
    units_.push_back(std::move(weak));
    living_.push_back(unit.get());
  }
  other.order_ = {};
  other.units_.clear();
  other.living_.clear();
}

// A unit that could not be made may never have been added.
void Schedule::remove(const Unit& unit) {
  if (unit.id() >= living_.size() || living_[unit.id()] != &unit) return;
  living_[unit.id()] = nullptr;
  order_.remove(unit.id());
}

std::vector<std::shared_ptr<Unit>> Schedule::units() const {
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto unit : order_.made()) {
    if (auto shared = units_[unit].lock()) units.push_back(std::move(shared));
  }
  return units;
}

std::vector<std::shared_ptr<Unit>> Schedule::call(const Unit& unit) const {
  std::vector<std::shared_ptr<Unit>> units{units_[unit.id()].lock()};
  for (const auto companion : order_.companions(unit.id())) units.push_back(units_[companion].lock());
  return units;
}

std::vector<std::shared_ptr<Unit>> Schedule::in_order_of_sums() const {
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto unit : order_.sums()) units.push_back(units_[unit].lock());
  return units;
}

bool Schedule::takes_part(const Unit& unit) const {
  return order_.takes_part(unit.id());
}

void Schedule::enter(Unit& unit, Keep keep) {
  const auto moment = now();
  const bool backward = moment.backward >= 0;
  const Event event(*this, unit);
  if (!backward) {
    if (another_runs_backward(unit.name())) return;
    thread_ = std::this_thread::get_id();
  }
  const observe::Label label(backward ? "FSDP::pre_backward" : "FSDP::pre_forward", unit.name());
  backward ? join_backward() : await_optimizer();
  order_.enter(unit.id(), keep, moment, *this);
  if (observe::recording()) unit.begin_span();
}

void Schedule::distrust_copies() {
  for (auto* unit : living_) {
    if (unit != nullptr) unit->shard_written();
  }
}

void Schedule::come_back(Unit& unit) {
  const Event event(*this, unit);
  order_.count_use(unit.id(), now());
  for (const auto& each : call(unit)) perform({Action::Kind::gather, each->id()});
}

bool Schedule::is_in(const Unit& unit, Keep keep, Order::Moment moment) {
  if (moment.backward < 0 && another_runs_backward(unit.name())) return true;
  return !await_event && order_.is_in(unit.id(), keep, moment, *this);
}

void Schedule::leave(Unit& unit, bool exactly) {
  const observe::Label label("FSDP::post_forward", unit.name());
  if (BackwardWatch::running()) return;
  unit.end_forward_span();
  const Event event(*this, unit);
  if (another_runs_backward(unit.name())) return;
  order_.leave(unit.id(), exactly, *this);
  if (was_captured_ && !unit.outer() && !now().with_gradients) distrust_copies();
}

void Schedule::fail_forward(Unit& unit) {
  unit.end_forward_span();
  order_.fail_forward(unit.id());
}

void Schedule::begin_unshard_by_hand(Unit& unit) {
  const Event event(*this, unit);
  if (another_runs_backward(unit.name())) return;
  follow_optimizer();
  if (unit.begin_unshard()) order_.gathered_by_hand(unit.id());
}

void Schedule::await_optimizer() {
  if (another_runs_backward()) return;
  if (const auto wait = std::exchange(await_event, {})) wait();
}

// The tree that a backward reaches first may differ between ranks, so all trees that it will reach join at once.
void Schedule::join_backward() {
  if (order_.in_backward() && !watch_.expired()) {
    // On a CPU a backward and those inside it run in one thread.
    if (backward_thread_ != std::this_thread::get_id() && !is_on_device()) {
      Turn::refuse("", backward_thread_number_, "has in a backward");
    }
    return;
  }
  if (order_.in_backward()) abandon_backward();
  const auto trees = trees_sharing_groups(units());
  for (const auto& tree : trees) tree->let_in_another();
  const Expectation expectation;
  const auto is_reached = [&](const std::shared_ptr<Unit>& unit) {
    const auto& parameters = unit->parameters();
    return std::any_of(parameters.begin(), parameters.end(), [&](const auto& parameter) {
      return parameter->alive() && expectation.holds(parameter->leaf());
    });
  };
  bool another_is_first = false;
  for (const auto& tree : trees) {
    const auto theirs = tree->units();
    if (tree.get() == this || !std::any_of(theirs.begin(), theirs.end(), is_reached)) continue;
    if (tree->number_ > number_) {
      join(expectation, another_is_first);
      another_is_first = true;
    }
    tree->join(expectation, another_is_first);
    another_is_first = true;
  }
  join(expectation, another_is_first);
}

// The number of started sums depends on when others were done, which differs between ranks.
void Schedule::let_in_another() {
  if (!order_.in_backward() || watch_.expired()) return;
  if (backward_thread_ != std::this_thread::get_id()) {
    if (is_on_device()) return;
    Turn::refuse("", backward_thread_number_, "has in a backward");
  }
  compare_started(in_backward_, order_.ready(), "the backward of another model inside one that is running");
  order_.start_ready_sums(*this);
}

void Schedule::join(const Expectation& expectation, bool another_is_first) {
  if (order_.in_backward()) return;
  turn_.need();
  for (const auto* unit : living_) {
    if (unit != nullptr) unit->check_modules();
  }
  backward_thread_ = std::this_thread::get_id();
  backward_thread_number_ = Turn::this_thread();
  in_backward_ = in_order_of_sums();
  order_.begin_backward(autograd::get_current_graph_task_id(), *this);
  const auto watch = BackwardWatch::current();
  watch->arriving(shared_from_this());
  watch_ = watch;
  is_reached_ = false;
  bool late = another_is_first;
  for (const auto& unit : in_backward_) {
    unit->follow_visible();
    unit->renew_groups();
    unit->sums().prepare();
    for (const auto& parameter : unit->parameters()) {
      // Autograd skips a leaf that was frozen after the forward.
      const bool is_trained = parameter->leaf_requires_grad();
      if (is_trained && expectation.holds(parameter->leaf())) order_.expect(unit->id(), parameter->index);
    }
    if (unit->options.sync && unit->sums().are_owed()) order_.engage(unit->id());
    late = late || (unit->sums().share_group() && !order_.starts_sums_alike());
  }
  order_.set_late(late);
  agree_on_sums(in_backward_);
}

void Schedule::gradient_arriving(Unit& unit, const group::Parameter& parameter, bool defined) {
  join_backward();
  if (order_.is_entered_by_gradients(unit.id())) enter(unit);
  if (!defined) order_.no_gradient(unit.id(), parameter.index, now());
}

bool Schedule::is_inside_another() const {
  return order_.is_inside_another({.backward = autograd::get_current_graph_task_id()});
}

void Schedule::gradient_arrived(Unit& unit, const group::Parameter& parameter) {
  join_backward();
  if (!std::exchange(is_reached_, true)) {
    if (const auto watch = watch_.lock()) watch->arrived(shared_from_this());
  }
  const auto moment = now();
  if (unit.sums().has_large(parameter)) unit.sums().take_large(order_.is_next(unit.id(), moment, *this));
  order_.gradient_arrived(unit.id(), parameter.index, moment, *this);
}

void Schedule::end_backward(bool runs_hooks) {
  hooks_wait_ = !runs_hooks;
  const auto until = c10::make_scope_exit([this] { hooks_wait_ = false; });
  const auto units = std::exchange(in_backward_, {});
  const auto inside = order_.reached_inside();
  order_.end_backward(/*publishes=*/!finalized_by_hand_, *this);
  if (!inside.empty()) sum_reached_inside(inside);
  if (finalized_by_hand_) return;
  for (const auto& unit : units) {
    if (unit) unit->sums().need_nothing_left();
  }
}

void Schedule::run_hooks() {
  for (const auto& unit : in_order_of_sums()) {
    if (unit) unit->sums().run_hooks();
  }
}

void Schedule::forget_hooks() {
  for (const auto& unit : units()) unit->sums().forget_hooks();
}

// All ranks do the same: they ran the same backwards inside this one.
void Schedule::sum_reached_inside(const std::vector<UnitId>& reached) {
  order_.begin_pending(reached, *this);
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto unit : reached) {
    units.push_back(units_[unit].lock());
    units.back()->sums().turn_to_inside();
  }
  agree_on_sums(units);
  order_.end_backward(/*publishes=*/!finalized_by_hand_, *this);
}

// The ranks compare which sums there will be, as at the beginning of a backward.
void Schedule::reduce_pending() {
  need_no_other_backward();
  in_backward_ = in_order_of_sums();
  order_.begin_pending(*this);
  for (const auto& unit : in_backward_) {
    unit->renew_groups();
    unit->sums().prepare();
    if (unit->sums().has_pending() || unit->sums().are_owed()) order_.engage(unit->id());
  }
  agree_on_sums(in_backward_);
  end_backward();
}

void Schedule::abandon_backward() noexcept {
  try {
    order_.start_ready_sums(*this);
    compare_started(in_backward_, order_.started(), "a backward that failed");
  } catch (const std::exception& error) {
    TORCH_WARN("shardwise: after a backward that failed, a sum failed too: ", error.what());
  }
  forget_backward();
}

// On a device, autograd's threads may keep the watch of a backward that died for a while.
bool Schedule::is_dead() const {
  const auto own = std::this_thread::get_id();
  return backward_thread_ == own || (thread_ == own && is_on_device()) || watch_.expired();
}

bool Schedule::another_runs_backward(const std::string& unit) {
  if (!order_.in_backward() || BackwardWatch::running()) return false;
  if (!is_dead()) {
    if (is_for_one_) Turn::refuse(unit, backward_thread_number_, "has in a backward");
    return true;
  }
  abandon_backward();
  return false;
}

void Schedule::need_no_other_backward() {
  if (another_runs_backward()) Turn::refuse("", backward_thread_number_, "has in a backward");
}

bool Schedule::is_on_device() const {
  return std::any_of(
      living_.begin(), living_.end(), [](const auto* unit) { return unit != nullptr && !unit->device().is_cpu(); });
}

void Schedule::forget_backward() {
  const auto units = std::exchange(in_backward_, {});
  order_.forget_backward(*this);
}

void Schedule::finish_sums() {
  need_no_other_backward();
  order_.finish_sums(*this);
}

void Schedule::reset() {
  need_no_other_backward();
  order_.reset(*this);
}

void Schedule::reset_iteration() {
  need_no_other_backward();
  finalizing_.reset();
  order_.reset_all(*this);
  for (const auto& unit : units()) unit->sums().forget_accumulated();
}

void Schedule::set_finalized_by_hand(bool value) {
  if (value == finalized_by_hand_) return;
  need_no_other_backward();
  if (BackwardWatch::running() || order_.has_unfinished_sums()) {
    throw Error(
        "shardwise: set_manual_backward_finalization() cannot change mode after backward starts. Call "
        "finalize_backward() or reset_iter_state() first.");
  }
  finalized_by_hand_ = value;
}

int64_t Schedule::finalize() {
  const char* problem =
      finalizing_ ? "the previous gradient reduction must be waited on before finalizing backward again."
      : !finalized_by_hand_
          ? "it requires manual backward finalization. Call set_manual_backward_finalization(true) before forward."
      : BackwardWatch::running() ? "it must be called after backward completes."
                                 : nullptr;
  if (problem != nullptr) throw Error(c10::str("shardwise: finalize_backward(): ", problem));
  reduce_pending();
  return finalizing_.emplace(++finalizations_);
}

void Schedule::wait_for_finalization(int64_t number) {
  if (finalizing_ != number) {
    throw Error(
        "shardwise: this gradient reduction handle was invalidated: reset_iter_state() dropped the gradients that it "
        "waits for.");
  }
  finalizing_.reset();
  finish_sums();
}

bool Schedule::perform(Action action) {
  using Kind = Action::Kind;
  auto& unit = *living_[action.unit];
  switch (action.kind) {
    case Kind::gather: {
      const bool waits = unit.begin_unshard();
      unit.finish_unshard();
      return waits;
    }
    case Kind::gather_ahead: {
      const auto* what = action.backward ? "FSDP::backward_prefetch" : "FSDP::forward_prefetch";
      const observe::Label label(what, unit.name(), observe::Label::Of::next);
      unit.begin_unshard();
      break;
    }
    case Kind::gather_list:
      gather_list(unit, action.backward);
      break;
    case Kind::free:
      unit.reshard(/*hold=*/!action.backward);
      break;
    case Kind::start_sum:
      unit.sums().begin();
      break;
    case Kind::poll_sum:
      return unit.sums().advance();
    case Kind::finish_first_sum:
      unit.sums().finish_first();
      break;
    case Kind::wait_sum:
      unit.sums().wait();
      break;
    case Kind::publish:
      unit.sums().publish();
      break;
    case Kind::run_hooks:
      if (!hooks_wait_) unit.sums().run_hooks();
      break;
    case Kind::forget_backward:
      unit.sums().forget();
      break;
  }
  return false;
}

// The units may belong to other trees.
void Schedule::gather_list(const Unit& unit, bool backward) {
  for (const auto& weak : backward ? unit.options.backward_prefetch : unit.options.forward_prefetch) {
    const auto next = weak.lock();
    if (!next) continue;
    next->schedule()->follow_optimizer();
    next->schedule()->perform({Action::Kind::gather_ahead, next->id(), backward});
  }
}

} // namespace shardwise::engine
