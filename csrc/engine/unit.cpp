#include "engine/unit.h"

#include "engine/backward_watch.h"
#include "engine/shards.h"
#include "observe/label.h"
#include "observe/record.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace shardwise::engine {

Unit::~Unit() {
  std::erase(schedule_->open_, this);
  schedule_->last_ = {};
  for (const auto& parameter : parameters_) {
    if (!parameter->whole) remove_shard(parameter->shard_identity());
  }
  for (const auto* tensor : seen_) remove_shard(tensor);
}

std::shared_ptr<Unit> Unit::of(const at::Tensor& parameter) {
  if (auto unit = unit_of_shard(parameter)) return unit;
  return std::static_pointer_cast<Unit>(group::Parameter::owner(parameter));
}

std::vector<std::shared_ptr<Unit>> Unit::inner() const {
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto& weak : inner_) {
    if (auto unit = weak.lock()) units.push_back(std::move(unit));
  }
  return units;
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
      .layout = settings_.layout,
      .rank = shards_.rank(),
      .world = shards_.size(),
      .full_dtype = settings_.precision.param_dtype,
      .sum_dtype = settings_.precision.reduce_dtype,
      .full_device = settings_.offload ? std::optional(mesh_.device()) : std::nullopt,
      .pin = settings_.offload && settings_.offload->pin_memory && !mesh_.device().is_cpu(),
      .front = settings_.front.get(),
      .takes_memory = takes_memory,
      .before = &groups_};
}

std::vector<std::shared_ptr<Unit>> Unit::tree() const {
  auto units = schedule_->units();
  std::erase_if(units, [&](const auto& unit) { return unit.get() != this && !unit->lies_below(*this); });
  return units;
}

template <typename Do>
void Unit::for_full_copies(const Do& act) {
  for (const auto& group : groups_) {
    if (auto* copies = group->copies()) act(*copies);
  }
}

void Unit::enter(Keep keep) {
  schedule_->enter(*this, keep);
  if (observe::recording()) in_backward() ? begin(backward_span_, "backward") : begin(forward_span_, "forward");
}

void Unit::use(const at::Tensor& tensor, Keep keep) {
  const auto serves = [&](const auto& group) {
    const auto* copies = group->full_copies();
    return copies != nullptr && copies->serves(tensor);
  };
  if (observe::recording() || !schedule_->is_in(*this, keep) || std::none_of(groups_.begin(), groups_.end(), serves)) {
    enter(keep);
  }
}

void Unit::leave(bool exactly) {
  const observe::Label label("FSDP::post_forward", name_);
  if (!in_backward()) forward_span_.reset();
  schedule_->leave(*this, exactly);
}

void Unit::begin(std::unique_ptr<observe::Span>& span, const char* kind) const {
  if (!span) span = std::make_unique<observe::Span>(kind, name_.empty() ? "(root)" : name_, mesh_.rank());
}

void Unit::show(bool full) {
  if (!settings_.front || std::exchange(shows_full_, full) == full) return;
  settings_.front->show(full);
}

void Unit::shard_written() {
  for_full_copies([](group::Copies& copies) { copies.mark_stale(); });
}

const group::Parameter* Unit::parameter_at(const at::Tensor& tensor) const {
  for (const auto& group : groups_) {
    const auto* copies = group->full_copies();
    const auto* parameter = copies == nullptr ? nullptr : copies->find(tensor);
    if (parameter != nullptr) return parameter;
  }
  return nullptr;
}

std::string Unit::describe() const {
  const auto others = parameters_.empty() ? 0 : parameters_.size() - 1;
  return c10::str(
      "unit '", name_, "' (", parameters_.empty() ? "no parameters" : parameters_.front()->name(), " and ", others,
      " more parameters)");
}

bool Unit::gathers_apart() const {
  return gathers_have_group_ && !(settings_.customs_on_mesh && options.all_gather);
}

bool Unit::sums_apart() const {
  return sums_have_groups_ && !(settings_.customs_on_mesh && options.reduce_scatter);
}

comm::Collectives Unit::gather_in_order(const comm::Collectives& ranks) {
  if (!agreement_) return ranks;
  const bool backward = BackwardWatch::running();
  const bool near = ranks == near_;
  const auto text = [&] {
    const auto among = near ? c10::str(" among ", near_.size(), " ranks") : "";
    return c10::str("the all-gather of ", describe(), among, backward ? " in backward" : "");
  };
  const bool apart = gathers_apart() || sums_apart();
  const auto chain = apart ? comm::Agreement::second_group : comm::Agreement::group;
  return ranks.at(agreement_->enter(chain, 4 * number_for_all_ + (near ? 2 : 0) + (backward ? 1 : 0), text, counters_));
}

comm::Collectives Unit::shards_in_order(int64_t event, const char* what) {
  if (!agreement_) return shards_;
  return shards_.at(agreement_->enter(
      comm::Agreement::group, event, [what] { return what; }, counters_));
}

void Unit::meet(int64_t event, const std::string& text) {
  if (agreement_) agreement_->meet(event, text, counters_);
}

std::vector<at::Tensor> Unit::stored() const {
  std::vector<at::Tensor> stored;
  for (const auto& parameter : parameters_) stored.push_back(parameter->stored());
  return stored;
}

bool Unit::sees_all() const {
  for (size_t i = 0; i < seen_.size(); ++i) {
    const auto& face = parameters_[i]->face();
    if (face && !sees(i, face->parameter())) return false;
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
  if (settings_.front && !shows_full_) {
    if (in_backward()) {
      backward.gathered = true;
    } else {
      for (const auto& parameter : parameters_) parameter->follow_face();
    }
  }
  if (!has_full_copies()) {
    // Leaves are what hooks and operations of the module see: they follow what stands for them.
    settings_.front ? renew_groups() : need_values();
    return false;
  }
  renew_groups();
  bool all_there = true;
  bool under_way = false;
  bool all_near = near_.size() > 1;
  for_full_copies([&](const group::Copies& copies) {
    all_there = all_there && !copies.must_gather();
    under_way = under_way || copies.state() == group::Copies::State::gathering;
    all_near = all_near && copies.holds();
  });
  if (all_there) return under_way;
  for (const auto& parameter : parameters_) parameter->hide_absent_gradient();
  for_full_copies([](group::Copies& copies) { copies.prepare(); });
  // What every rank has may come and go on some ranks only.
  const auto& ranks = all_near ? near_ : gathers_apart() ? gather_ : known_;
  const auto gather = shards_.size() > 1 ? gather_in_order(ranks).by(options.all_gather) : ranks;
  for_full_copies(
      [&](group::Copies& copies) { copies.begin_unshard(gather, near_.size() > 1, buffers(), name_, counters_); });
  return true;
}

void Unit::finish_unshard() {
  bool written = false;
  const int64_t holders = BackwardWatch::running() ? 1 : near_.size();
  for_full_copies(
      [&](group::Copies& copies) { written = copies.finish_unshard(holders, buffers(), name_, counters_) || written; });
  if (!written) return show(true);
  // While the old values were on the wire.
  begin_unshard();
  finish_unshard();
}

void Unit::reshard(bool hold) {
  show(false);
  for_full_copies([&](group::Copies& copies) {
    copies.reshard(buffers(), counters_);
    if (!hold) copies.drop_held(buffers());
  });
}

bool Unit::unshard() {
  const bool gathers = begin_unshard();
  finish_unshard();
  return gathers;
}

bool Unit::reshards_after_forward() const {
  return options.reshard_after_forward.value_or(outer_ != nullptr);
}

// A gather takes over what was frozen; but not in a backward, which knows by then which gradients will come.
void Unit::end_backward() {
  if (backward.gathered && shows_full_) {
    for (const auto& parameter : parameters_) parameter->follow_face();
  }
  backward = {};
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
  schedule_->settle();
  reshard();
  const auto take = [&](const auto& group) {
    return has_memory(group) || (group->full_copies() && group->full_copies()->take_memory(*settings_.front));
  };
  // All groups that can, also where another one has to be made anew.
  size_t taken = 0;
  for (const auto& group : groups_) taken += take(group) ? 1 : 0;
  if (taken < groups_.size()) follow_parameters(/*takes_memory=*/true);
}

void Unit::follow_parameters(bool takes_memory) {
  const auto fits = [](const auto& group) { return group->fits(); };
  // Of a backward that was not the last one.
  const auto settle = [&] { schedule_->settle(); };
  if (!std::all_of(groups_.begin(), groups_.end(), fits)) {
    need_no_copies();
    settle();
    reshard();
    // Where that fails, the old ones stay, and are found unfit again.
    auto renewed = group::Group::make(parameters_, setting(takes_memory));
    groups_ = std::move(renewed);
    return;
  }
  for (const auto& group : groups_) group->follow_requires_grad(settle);
}

std::string Unit::when_resharded() const {
  const auto has_copies = [](const auto& group) { return group->copies() != nullptr; };
  if (std::none_of(groups_.begin(), groups_.end(), has_copies)) return "-";
  if (reshards_after_forward()) {
    return near_.size() > 1 ? c10::str("to ", near_.size(), " ranks after forward") : "after forward";
  }
  return reshards_after_backward() ? "after backward" : "never";
}

Plan::Unit Unit::own_plan() const {
  Plan::Unit plan{.name = name_, .kind = kind(), .axes = {}, .reshard = when_resharded(), .groups = {}};
  for (const auto& axis : mesh_.axes()) plan.axes.emplace_back(axis.name, axis.size);
  const group::Group::Step step{
      .replicates = replicates(),
      .shards = shards_.size(),
      .copies = copies_.size(),
      .gathers_in_backward = reshards_after_forward(),
      .backward_ranks = near_.size() > 1 ? near_.size() : shards_.size(),
      .sums = options.sync && world() > 1,
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

} // namespace shardwise::engine
