#include "engine/schedule.h"

#include "engine/backward_watch.h"
#include "engine/trees.h"
#include "engine/unit.h"
#include "observe/label.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace shardwise::engine {
namespace {

namespace autograd = torch::autograd;

void append(const std::shared_ptr<Unit>& unit, std::vector<std::shared_ptr<Unit>>& order) {
  auto inner = unit->inner();
  std::sort(inner.begin(), inner.end(), [](const auto& a, const auto& b) { return a->number() > b->number(); });
  for (const auto& below : inner) append(below, order);
  order.push_back(unit);
}

} // namespace

/// Which leaves the running backward will bring a gradient to.
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

void Schedule::add(const std::shared_ptr<Unit>& unit) {
  std::erase_if(units_, [](const auto& weak) { return weak.expired(); });
  units_.push_back(unit);
}

void Schedule::take_over(Schedule& other) {
  for (const auto& unit : other.units()) {
    unit->set_schedule(shared_from_this());
    add_to_tree(*unit, shared_from_this());
    units_.push_back(unit);
  }
  open_.insert(open_.end(), other.open_.begin(), other.open_.end());
  other.open_.clear();
  other.units_.clear();
}

std::vector<std::shared_ptr<Unit>> Schedule::units() const {
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto& weak : units_) {
    if (auto unit = weak.lock()) units.push_back(std::move(unit));
  }
  std::sort(units.begin(), units.end(), [](const auto& a, const auto& b) { return a->number() < b->number(); });
  return units;
}

std::vector<std::shared_ptr<Unit>> Schedule::reduce_order() const {
  std::vector<std::shared_ptr<Unit>> order;
  for (const auto& unit : units()) {
    if (!unit->outer()) append(unit, order);
  }
  return order;
}

Schedule::Entered Schedule::entered_now(const Unit& unit, Keep keep) {
  return {&unit, keep, autograd::get_current_graph_task_id(), c10::GradMode::is_enabled()};
}

// Sums start at events of a backward, and this is one.
bool Schedule::is_in(const Unit& unit, Keep keep) {
  if (last_.unit != &unit || last_ != entered_now(unit, keep) || await_event) return false;
  if (last_.backward != -1) advance();
  return true;
}

void Schedule::enter(Unit& unit, Keep keep) {
  const bool backward = BackwardWatch::running();
  const observe::Label label(backward ? "FSDP::pre_backward" : "FSDP::pre_forward", unit.name());
  const auto stays = [&](const Unit& other) {
    if (keep == Keep::all || &other == &unit || unit.lies_below(other)) return true;
    // Of several modules, some have their backward still to come.
    if (backward && other.options.has_several_modules && other.backward.missing > 0) return true;
    return keep == Keep::outer_and_inner && other.lies_below(unit);
  };
  // A copy: closing takes units out.
  const auto open = open_;
  for (auto* other : open) {
    if (!stays(*other)) close(*other, backward);
  }
  if (std::find(open_.begin(), open_.end(), &unit) == open_.end()) open_.push_back(&unit);
  if (backward) {
    join_backward();
    unit.backward.entered = true;
  } else if (c10::GradMode::is_enabled()) {
    unit.backward.engaged = true;
  }
  if (!backward) await_optimizer();
  const bool gathered = unit.unshard();
  const bool by_hand = is_by_hand(unit);
  const bool begins = by_hand && !unit.outer();
  if (begins) unit.gathered_by_hand = -1;
  prefetch(unit, by_hand ? begins : gathered, backward);
  last_ = entered_now(unit, keep);
  if (backward) advance();
}

void Schedule::begin_unshard_by_hand(Unit& unit) {
  if (unit.begin_unshard()) unit.gathered_by_hand = forwards_;
}

bool Schedule::is_by_hand(const Unit& unit) const {
  return unit.gathered_by_hand == forwards_;
}

// Where gradients are to come, only what ends a forward tells where one begins: a unit may run twice in it.
void Schedule::prefetch(Unit& unit, bool gathered, bool backward) {
  const auto& list = backward ? unit.options.backward_prefetch : unit.options.forward_prefetch;
  for (const auto& weak : list) {
    if (const auto next = weak.lock()) begin_unshard_ahead(*next, backward);
  }
  if (!gathered || unit.shards().size() == 1) return;
  const bool infers = !backward && !c10::GradMode::is_enabled();
  auto& order = backward ? backwards_ : infers ? inference_ : training_;
  if (infers && order.comes_round(unit)) order.end_pass();
  const auto next = order.used(unit.shared_from_this());
  if (!next || is_by_hand(*next) || !prefetches || !list.empty() || (backward && !next->unshards_in_backward())) return;
  begin_unshard_ahead(*next, backward);
}

void Schedule::begin_unshard_ahead(Unit& unit, bool backward) {
  const auto* what = backward ? "FSDP::backward_prefetch" : "FSDP::forward_prefetch";
  const observe::Label label(what, unit.name(), observe::Label::Of::next);
  unit.begin_unshard();
}

void Schedule::end_forwards() {
  ++forwards_;
  training_.end_pass();
  inference_.end_pass();
}

void Schedule::await_optimizer() {
  if (const auto wait = std::exchange(await_event, {})) wait();
}

// Otherwise the unit itself stays open, for it may run again at once: on some ranks more often than on others.
void Schedule::leave(Unit& unit, bool exactly) {
  if (BackwardWatch::running()) return;
  const auto open = open_;
  for (auto* other : open) {
    if (other->lies_below(unit) || (other == &unit && (exactly || !unit.outer()))) close(*other, false);
  }
  if (!unit.outer()) end_forwards();
}

void Schedule::close(Unit& unit, bool backward) {
  last_ = {};
  std::erase(open_, &unit);
  if (backward ? unit.reshards_after_backward() : unit.reshards_after_forward()) unit.reshard(/*hold=*/!backward);
}

void Schedule::close_all() {
  last_ = {};
  open_.clear();
  for (const auto& unit : units()) {
    if (unit->reshards_after_backward()) unit->reshard();
  }
}

// Which of several trees a backward comes to first may differ between ranks: all that it will come to join at once.
void Schedule::join_backward() {
  if (backward_ != -1) return;
  const Expectation expectation;
  const auto is_reached = [&](const std::shared_ptr<Unit>& unit) {
    const auto& parameters = unit->parameters();
    return std::any_of(parameters.begin(), parameters.end(), [&](const auto& parameter) {
      return parameter->alive() && expectation.holds(parameter->leaf());
    });
  };
  bool another_is_first = false;
  for (const auto& tree : trees_beside(units())) {
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

void Schedule::join(const Expectation& expectation, bool another_is_first) {
  if (backward_ != -1) return;
  last_ = {};
  settle();
  end_forwards();
  const auto watch = BackwardWatch::current();
  watch->arriving(shared_from_this());
  watch_ = watch;
  backward_ = autograd::get_current_graph_task_id();
  order_ = reduce_order();
  launched_ = 0;
  reached_ = false;
  for (const auto& unit : order_) {
    unit->renew_groups();
    unit->take_leaf_gradients();
    unit->backward.missing = 0;
    for (const auto& parameter : unit->parameters()) {
      parameter->arrived = false;
      parameter->expected = expectation.holds(parameter->leaf());
      if (parameter->expected) ++unit->backward.missing;
    }
    if (unit->backward.missing > 0 || (unit->options.sync && unit->owes())) unit->backward.engaged = true;
  }
  late_ =
      another_is_first || std::any_of(order_.begin(), order_.end(), [](const auto& unit) { return unit->sums_late(); });
  agree_on_sums(order_);
}

void Schedule::note(Unit& unit, group::Parameter& parameter) {
  if (backward_ != autograd::get_current_graph_task_id() || !parameter.expected || parameter.arrived) return;
  parameter.arrived = true;
  --unit.backward.missing;
}

void Schedule::gradient_arriving(Unit& unit, group::Parameter& parameter, bool defined) {
  join_backward();
  if (!unit.backward.entered && unit.unshards_in_backward()) enter(unit);
  if (!defined) note(unit, parameter);
}

void Schedule::gradient_arrived(Unit& unit, group::Parameter& parameter) {
  join_backward();
  if (const auto watch = watch_.lock()) watch->arrived(shared_from_this());
  reached_ = true;
  unit.backward.engaged = true;
  note(unit, parameter);
  advance();
}

// Where sums share a process group with all-gathers, or with those of another tree, they wait for the end: when
// gradients become ready may differ between ranks, and so would the order on it. For the same reason nobody waits for a
// sum here: the ranks that it waits for may need a gather that this rank comes to later.
void Schedule::advance() {
  if (backward_ != autograd::get_current_graph_task_id()) return;
  start_sums([&] {
    const auto before = in_flight_.lock();
    return !before || before->advance_reduce();
  });
}

template <typename Condition>
void Schedule::start_sums(const Condition& may_start) {
  if (!reached_ || late_) return;
  for (; launched_ < order_.size(); ++launched_) {
    auto& unit = *order_[launched_];
    // Asked first: it starts the second sum of the one before, which needs time too.
    if (!may_start() || unit.backward.missing > 0) return;
    launch(unit);
  }
}

void Schedule::launch(Unit& unit) {
  if (!unit.takes_part()) return;
  if (const auto before = in_flight_.lock()) before->wait_reduce();
  in_flight_ = unit.weak_from_this();
  unit.begin_reduce();
}

void Schedule::end_backward() {
  try {
    for (; launched_ < order_.size(); ++launched_) launch(*order_[launched_]);
    if (const auto last = in_flight_.lock()) is_last_backward ? last->wait_reduce() : last->end_scatter();
  } catch (...) {
    forget_backward();
    throw;
  }
  backwards_.end_pass();
  const auto order = std::exchange(order_, {});
  unsettled_.assign(order.begin(), order.end());
  backward_ = -1;
  launched_ = 0;
  close_all();
  for (const auto& unit : order) unit->end_backward();
  if (is_last_backward) settle();
}

// Which sums there will be is compared as at the begin of a backward.
void Schedule::reduce_pending() {
  settle();
  order_ = reduce_order();
  launched_ = 0;
  for (const auto& unit : order_) {
    unit->renew_groups();
    unit->take_leaf_gradients();
    if (unit->has_pending() || unit->owes()) unit->backward.engaged = true;
  }
  agree_on_sums(order_);
  end_backward();
}

void Schedule::settle() {
  const auto order = std::exchange(unsettled_, {});
  if (order.empty()) return;
  if (const auto unit = std::exchange(in_flight_, {}).lock()) unit->wait_reduce();
  for (const auto& weak : order) {
    if (const auto unit = weak.lock()) unit->publish();
  }
}

// When a sum starts depends on when the one before was done. Where a backward dies on all ranks, those that all can
// start are started, whatever was under way then: on no rank is one left over that others do not join.
void Schedule::abandon_backward() noexcept {
  try {
    start_sums([] { return true; });
  } catch (const std::exception& error) {
    TORCH_WARN("shardwise: after a backward that failed, a sum failed too: ", error.what());
  }
  forget_backward();
}

void Schedule::forget_backward() {
  order_.clear();
  backwards_.forget_pass();
  in_flight_.reset();
  backward_ = -1;
  launched_ = 0;
  const auto all = units();
  for (const auto& unit : all) {
    unit->backward = {.engaged = unit->backward.engaged};
    unit->forget_backward();
  }
  close_all();
}

void Schedule::reset() {
  settle();
  forget_backward();
  training_.forget_pass();
  inference_.forget_pass();
  for (const auto& unit : units()) {
    unit->backward = {};
    unit->reshard();
  }
}

} // namespace shardwise::engine
