#include "engine/unit.h"

#include "base/compute_guard.h"
#include "base/weak_table.h"
#include "engine/backward_watch.h"
#include "group/data.h"
#include "observe/label.h"
#include "observe/record.h"

#include <shardwise/error.h>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::engine {
namespace {

base::WeakTable<const at::TensorImpl*, Unit>& shard_table() {
  static auto* table = new base::WeakTable<const at::TensorImpl*, Unit>;
  return *table;
}

} // namespace

void Unit::add_shard(const at::Tensor& shard) {
  shard_table().set(shard.unsafeGetTensorImpl(), weak_from_this());
}

void Unit::remove_shard(const at::TensorImpl* shard) {
  shard_table().erase(shard);
}

std::shared_ptr<Unit> unit_of_shard(const at::Tensor& shard) {
  return shard_table().find(shard.unsafeGetTensorImpl());
}

Unit::~Unit() {
  schedule_->remove(*this);
  for (const auto& parameter : parameters_) {
    if (!parameter->whole) remove_shard(parameter->shard_identity());
  }
  for (const auto* tensor : seen_) remove_shard(tensor);
}

std::shared_ptr<Unit> Unit::of(const at::Tensor& parameter) {
  if (auto unit = unit_of_shard(parameter)) return unit;
  return std::static_pointer_cast<Unit>(group::Parameter::owner(parameter));
}

bool Unit::lies_below(const Unit& other) const {
  return outer_ && (outer_.get() == &other || outer_->lies_below(other));
}

bool Unit::has(const at::Tensor& parameter) const {
  const auto unit = of(parameter);
  return unit && (unit.get() == this || unit->lies_below(*this));
}

group::Group::Setting Unit::setting(bool takes_memory) const {
  return {
      .policy =
          {.layout = settings_.layout,
           .world = shards().size(),
           .full_dtype = settings_.precision.param_dtype(),
           .sum_dtype = settings_.precision.reduce_dtype()},
      .rank = shards().rank(),
      .full_device = settings_.offload ? std::optional(mesh_.device()) : std::nullopt,
      .pin = pins(),
      .front_end = settings_.front_end.get(),
      .takes_memory = takes_memory,
      .before = &groups_};
}

std::vector<std::shared_ptr<Unit>> Unit::tree() const {
  auto units = schedule_->units();
  std::erase_if(units, [&](const auto& unit) { return unit.get() != this && !unit->lies_below(*this); });
  return units;
}

std::vector<std::shared_ptr<Unit>> Unit::call() {
  return schedule_->call(*this);
}

template <typename Do>
void Unit::for_full_copies(const Do& act) {
  for (const auto& group : groups_) {
    if (auto* copies = group->copies()) act(*copies);
  }
}

void Unit::use(const at::Tensor& tensor, Keep keep, Order::Moment moment) {
  const auto serves = [&](const auto& group) {
    const auto* copies = group->full_copies();
    return copies != nullptr && copies->serves(tensor);
  };
  if (observe::recording() || !schedule_->is_in(*this, keep, moment) ||
      std::none_of(groups_.begin(), groups_.end(), serves)) {
    schedule_->enter(*this, keep);
  }
}

void Unit::end_forward_span() {
  forward_span_.reset();
}

void Unit::begin_span() {
  BackwardWatch::running() ? begin(backward_span_, "backward") : begin(forward_span_, "forward");
}

void Unit::begin(std::unique_ptr<observe::Span>& span, const char* kind) const {
  if (!span) span = std::make_unique<observe::Span>(kind, name_.empty() ? "(root)" : name_, mesh_.rank());
}

void Unit::show(bool full) {
  if (!settings_.front_end || std::exchange(shows_full_, full) == full) return;
  settings_.front_end->show(full);
}

void Unit::shard_written() {
  for_full_copies([](group::Copies& copies) {
    copies.let_host_write();
    copies.mark_stale();
  });
}

const group::Parameter* Unit::parameter_at(const at::Tensor& tensor) const {
  for (const auto& group : groups_) {
    const auto* copies = group->full_copies();
    const auto* parameter = copies == nullptr ? nullptr : copies->find(tensor);
    if (parameter != nullptr) return parameter;
  }
  return nullptr;
}

std::string Unit::describe_gather(bool near, bool backward) const {
  const auto others = parameters_.empty() ? 0 : parameters_.size() - 1;
  return c10::str(
      "the all-gather of unit '", name_, "' (", parameters_.empty() ? "no parameters" : parameters_.front()->name(),
      " and ", others, " more parameters)", near ? c10::str(" among ", ranks_.neighbours().size(), " ranks") : "",
      backward                      ? " in backward"
      : c10::GradMode::is_enabled() ? " in a forward"
                                    : " in a forward without gradients");
}

std::vector<at::Tensor> Unit::stored() const {
  std::vector<at::Tensor> stored;
  for (const auto& parameter : parameters_) stored.push_back(parameter->stored());
  return stored;
}

std::vector<NamedTensor> Unit::named_parameters() const {
  std::vector<NamedTensor> named;
  for (const auto& parameter : parameters_) {
    named.push_back({.names = parameter->names(), .tensor = parameter->visible()});
  }
  return named;
}

bool Unit::sees_all() const {
  for (size_t i = 0; i < seen_.size(); ++i) {
    const auto& visible = parameters_[i]->visible_parameter();
    if (visible && !sees(i, visible->parameter())) return false;
  }
  return true;
}

void Unit::set_extension(size_t index, std::shared_ptr<group::Extension> extension) {
  parameters_.at(index)->set_extension(std::move(extension));
}

const group::Parameter* Unit::parameter_of_shard(const at::Tensor& tensor) const {
  for (const auto& parameter : parameters_) {
    if (!parameter->whole && parameter->shard_identity() == tensor.unsafeGetTensorImpl()) return parameter.get();
  }
  return nullptr;
}

bool Unit::begin_unshard() {
  need_own_memory();
  follow_visible();
  sums_.rest();
  if (!has_full_copies()) {
    // Hooks and operations see the leaves, which must follow the tensors that a front end shows in their place.
    settings_.front_end ? renew_groups() : need_values();
    return false;
  }
  renew_groups();
  bool all_there = true;
  bool under_way = false;
  bool all_near = ranks_.neighbours().size() > 1;
  const auto capture = comm::capture_of(mesh_.device());
  if (capture != 0) schedule_->note_capture();
  for_full_copies([&](group::Copies& copies) {
    copies.use_in(capture, buffers());
    all_there = all_there && !copies.must_gather();
    under_way = under_way || copies.state() == group::Copies::State::gathering;
    all_near = all_near && copies.holds();
  });
  if (all_there) return under_way;
  for (const auto& parameter : parameters_) parameter->hide_absent_gradient();
  for_full_copies([](group::Copies& copies) { copies.prepare(); });
  const bool backward = BackwardWatch::running();
  const bool may_hold = ranks_.neighbours().size() > 1;
  const auto what = [&] { return describe_gather(all_near, backward); };
  const auto gather = ranks_.for_gather(
      {.near = all_near, .backward = backward, .unit = number_for_all_}, options.custom_collectives, what, counters_);
  for_full_copies([&](group::Copies& copies) { copies.begin_unshard(gather, may_hold, buffers(), name_, counters_); });
  return true;
}

void Unit::finish_unshard() {
  bool written = false;
  const int64_t holders = BackwardWatch::running() ? 1 : ranks_.neighbours().size();
  for_full_copies(
      [&](group::Copies& copies) { written = copies.finish_unshard(holders, buffers(), name_, counters_) || written; });
  if (!written) return show(true);
  // A shard was written while the old values were on their way: gather again.
  begin_unshard();
  finish_unshard();
}

void Unit::reshard(bool hold) {
  show(false);
  for_full_copies([&](group::Copies& copies) {
    copies.reshard(buffers(), options.keeps_storage, counters_);
    if (!hold) copies.drop_held(buffers());
  });
}

void Unit::gradient_arriving(group::Parameter& parameter, bool defined) {
  schedule_->gradient_arriving(*this, parameter, defined);
  if (!observe::recording()) return;
  // The end of a direct call cannot be seen, but it is over once a gradient comes.
  forward_span_.reset();
  if (schedule_->order().missing(id_) > 0) begin(backward_span_, "backward");
}

bool Unit::is_inside_another() const {
  return schedule_->is_inside_another();
}

void Unit::gradient_arrived(group::Parameter& parameter) {
  schedule_->gradient_arrived(*this, parameter);
  if (schedule_->order().missing(id_) == 0) backward_span_.reset();
}

void Unit::gradient_published(const at::Tensor& gradient) {
  if (settings_.front_end && shards().size() > 1) settings_.front_end->published(gradient);
}

void Unit::follow_visible() {
  if (!settings_.front_end || shows_full_) return;
  for (const auto& parameter : parameters_) parameter->follow_visible();
}

void Unit::renew_groups() {
  need_values();
  follow_parameters(/*takes_memory=*/false);
}

void Unit::take_memory() {
  const auto has_memory = [](const auto& group) {
    return group->fits() && (!group->full_copies() || group->full_copies()->has_memory());
  };
  if (std::all_of(groups_.begin(), groups_.end(), has_memory)) return;
  schedule_->finish_sums();
  reshard();
  const auto take = [&](const auto& group) {
    return has_memory(group) || (group->full_copies() && group->full_copies()->take_memory(*settings_.front_end));
  };
  // Every group that can takes its memory, even if another group has to be remade.
  size_t taken = 0;
  for (const auto& group : groups_) taken += take(group) ? 1 : 0;
  if (taken < groups_.size()) follow_parameters(/*takes_memory=*/true);
}

void Unit::follow_parameters(bool takes_memory) {
  const auto fits = [](const auto& group) { return group->fits(); };
  const auto finish_sums = [&] { schedule_->finish_sums(); };
  if (!std::all_of(groups_.begin(), groups_.end(), fits)) {
    need_no_copies();
    finish_sums();
    reshard();
    // If this throws, the old groups stay, and the next call finds again that they do not fit.
    auto renewed = group::Group::make(parameters_, setting(takes_memory));
    groups_ = std::move(renewed);
    return;
  }
  for (const auto& group : groups_) group->follow_requires_grad(finish_sums);
}

std::string Unit::when_resharded() const {
  const auto has_copies = [](const auto& group) { return group->copies() != nullptr; };
  if (std::none_of(groups_.begin(), groups_.end(), has_copies)) return "-";
  if (schedule_->order().reshards_after_forward(id_)) {
    const auto near = ranks_.neighbours().size();
    return near > 1 ? c10::str("to ", near, " ranks after forward") : "after forward";
  }
  return timing().reshard_after_backward ? "after backward" : "never";
}

Plan::Unit Unit::own_plan() const {
  Plan::Unit plan{.name = name_, .kind = kind(), .axes = {}, .reshard = when_resharded(), .groups = {}};
  for (const auto& axis : mesh_.axes()) plan.axes.emplace_back(axis.name, axis.size);
  const auto near = ranks_.neighbours().size();
  const group::Group::Step step{
      .replicates = replicates(),
      .shards = shards().size(),
      .copies = ranks_.copies().size(),
      .gathers_in_backward = schedule_->order().reshards_after_forward(id_),
      .backward_ranks = near > 1 ? near : shards().size(),
      .sums = options.sync && ranks_.world() > 1,
      .sums_copies = options.all_reduce};
  for (const auto& group : groups_) plan.groups.push_back(group->plan(step));
  return plan;
}

Plan Unit::plan() const {
  Plan plan;
  plan.mesh = mesh_.describe();
  for (const auto& unit : tree()) {
    plan.units.push_back(unit->own_plan());
  }
  return plan;
}

Counters Unit::counters() const {
  Counters sum;
  for (const auto& unit : tree()) sum += unit->counters_;
  return sum;
}

std::string still_on_meta(std::optional<int64_t> rank, const std::vector<std::string>& names) {
  std::string list;
  for (const auto& name : names) list += (list.empty() ? "'" : ", '") + name + "'";
  return c10::str(
      "shardwise: ", rank ? c10::str("rank ", *rank, ": ") : "",
      "these are still on the meta device and have no values: ", list,
      ". Call shardwise::to_empty(model) after making the outermost unit, then give them values: initialize them in "
      "with_whole_parameters(), or call load_full_state_dict().");
}

at::Tensor with_memory(const at::Tensor& tensor, at::Device device) {
  const base::ComputeGuard guard;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device)).zero_();
}

void Unit::need_values() const {
  const auto on_meta = [](const auto& group) { return group->on_meta(); };
  if (std::none_of(groups_.begin(), groups_.end(), on_meta)) return;
  std::vector<std::string> names;
  for (const auto& unit : schedule_->units()) {
    for (const auto& parameter : unit->parameters_) {
      if (parameter->stored().is_meta()) names.push_back(parameter->name());
    }
  }
  // They got memory since the groups were made; the next use remakes the groups.
  if (names.empty()) return;
  throw Error(still_on_meta(mesh_.rank(), names));
}

// Where a module's members and parameters() are the same tensors, they cannot be separated later.
void Unit::need_no_copies() const {
  if (has_full_copies()) return;
  for (const auto& parameter : parameters_) {
    const auto dtype = parameter->stored().scalar_type();
    const auto full = settings_.full_dtype(dtype, parameter->full_dtype);
    if (dtype == full) continue;
    throw Error(c10::str(
        "shardwise: rank ", mesh_.rank(), ": the parameter '", parameter->name(), "' was cast to ",
        c10::getDtypeNames(dtype).first, " after replicate(), but its module computes in ",
        c10::getDtypeNames(full).first,
        " (param_dtype). This needs separate copies of the parameters, which replicate() makes only if the dtypes "
        "differ when it is called. Cast the module first, then call replicate()."));
  }
}

void Unit::lend_leaf(const group::Parameter& parameter, const at::Tensor& whole) {
  const base::ComputeGuard guard;
  group::replace_data(parameter.full(), whole);
}

std::string Unit::restore_memory() const {
  std::string lost;
  for (const auto& parameter : parameters_) {
    if (!parameter->lost_memory()) continue;
    if (lost.empty()) lost = parameter->name();
    parameter->restore_memory();
    if (settings_.front_end) settings_.front_end->mark(parameter->full());
  }
  return lost;
}

// The memory is restored before the error is raised, so that the unit can be used again.
void Unit::need_own_memory() const {
  const auto lost = restore_memory();
  if (lost.empty()) return;
  throw Error(c10::str(
      "shardwise: rank ", mesh_.rank(),
      ": casting, moving or loading only a part of the wrapped module replaced the memory of the full parameter '",
      lost,
      "'. The optimizer trains another tensor, so the change would have been lost; it was undone. Call reshard() on "
      "the wrapped module before such a change, or cast, move or load the wrapped module itself."));
}

void Unit::provide_memory(const std::vector<at::Tensor>& parameters) {
  for (const auto& tensor : parameters) {
    if (!tensor.is_meta()) continue;
    if (parameter_of_shard(tensor) == nullptr) {
      group::replace_data(tensor, with_memory(tensor, mesh_.device()));
      continue;
    }
    const base::ComputeGuard guard;
    const auto options = tensor.options().device(settings_.offload ? at::Device(at::kCPU) : mesh_.device());
    // An expanded scalar takes no memory of this size; the group copies it into its part.
    group::replace_data(tensor, at::zeros({}, options).expand(tensor.sizes()));
  }
  follow_parameters(/*takes_memory=*/true);
}

} // namespace shardwise::engine
