#include "engine/unit.h"

#include "engine/backward_watch.h"
#include "engine/shards.h"
#include "engine/structure.h"
#include "group/compute_guard.h"
#include "observe/seam.h"

#include <shardwise/error.h>

#include <ATen/ops/detach.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <set>

namespace shardwise::engine {
namespace {

std::atomic<int64_t> next_number = 0;

/// For the agreement; those of units are not negative.
constexpr int64_t kWrapping = -2;

const char* kind_of(const UnitSettings& settings) {
  return settings.layout == group::Layout::replicate ? "replicate" : "fully_shard";
}

const std::string& only_axis(const Mesh& mesh, const UnitSettings& settings) {
  if (mesh.ndim() != 1) {
    throw ValueError(c10::str(
        "shardwise: ", kind_of(settings), " expects a 1D DeviceMesh but got ", mesh.describe(),
        ". Give it a mesh of one axis, over the ranks that are to hold ",
        settings.layout == group::Layout::replicate ? "copies." : "shards."));
  }
  return mesh.axes().front().name;
}

std::string line(const NamedTensor& parameter, bool sharded) {
  const auto& tensor = parameter.tensor;
  const auto cut = !sharded ? "" : parameter.whole ? " whole" : c10::str(" cut along ", parameter.shard_dim);
  return c10::str(
      "'", parameter.names.front(), "' ", c10::getDtypeNames(tensor.scalar_type()).first, " ", tensor.sizes(), cut,
      tensor.requires_grad() ? "" : " frozen");
}

void check_can_be_sharded(const NamedTensor& parameter) {
  if (parameter.whole) return;
  const auto& tensor = parameter.tensor;
  const auto& name = parameter.names.front();
  if (tensor.layout() != at::kStrided || tensor.is_meta()) {
    throw ValueError(c10::str(
        "shardwise: the parameter '", name, "' is ", tensor.is_meta() ? "on the meta device" : "not a dense tensor",
        "; only dense tensors with values can be sharded. ",
        tensor.is_meta() ? "Give it values first, or name it in ignored_parameters."
                         : "Name it in ignored_parameters."));
  }
  if (tensor.dim() == 0) {
    throw ValueError(c10::str(
        "shardwise: fully_shard doesn't support scalar parameters. Change ", name,
        " to a 1D tensor with numel equal to 1."));
  }
  if (!tensor.is_contiguous()) {
    throw ValueError(c10::str(
        "shardwise: FSDP does not support non-contiguous parameters yet: '", name, "' has sizes ", tensor.sizes(),
        " and strides ", tensor.strides(), ". Make it contiguous() before fully_shard()."));
  }
  if (parameter.shard_dim < 0 || parameter.shard_dim >= tensor.dim()) {
    throw ValueError(c10::str(
        "shardwise: '", name, "' has ", tensor.dim(), " dimensions and cannot be sharded along dimension ",
        parameter.shard_dim, ". shard_placement must give one that it has."));
  }
}

/// What stands before `local` at the end of `full`, without the dot.
std::string path_before(const std::string& full, const std::string& local) {
  const auto size = full.size() - std::min(full.size(), local.size());
  return full.substr(0, size > 0 ? size - 1 : 0);
}

} // namespace

Unit::Unit(const Mesh& mesh, const UnitSettings& settings)
    : number_(next_number++),
      mesh_(mesh),
      settings_(settings),
      gather_(mesh.group(only_axis(mesh, settings))),
      reduce_(gather_),
      schedule_(std::make_shared<Schedule>(number_)) {
  options.reshard_after_forward = settings.reshard_after_forward;
}

std::shared_ptr<Unit> Unit::create(
    const Mesh& mesh, std::vector<NamedTensor> parameters, const std::vector<NamedTensor>& buffers,
    const UnitSettings& settings) {
  std::shared_ptr<Unit> unit(new Unit(mesh, settings));
  std::vector<NamedTensor> own;
  std::vector<NamedTensor> adopted;
  for (auto& parameter : parameters) (of(parameter.tensor) ? adopted : own).push_back(std::move(parameter));
  if (unit->sharded()) std::for_each(own.begin(), own.end(), check_can_be_sharded);
  unit->agreement_ = comm::Agreement::of(mesh.group(mesh.axes().front().name));
  unit->check_structure(own, adopted.size());
  unit->schedule_->add(unit);
  unit->adopt(adopted);
  if (settings.broadcast) {
    unit->broadcast(own);
    unit->broadcast(buffers);
  }
  if (unit->sharded()) {
    const auto& axis = mesh.axes().front().name;
    // Sums stay where those of replicated units are; gathers get the other process group.
    unit->gather_ = comm::Collectives(mesh.reduce_group(axis));
    unit->separate_ = mesh.reduce_group(axis) != mesh.group(axis);
  }
  for (auto& [names, tensor, dim, whole] : own) {
    auto& parameter = *unit->parameters_.emplace_back(std::make_unique<group::Parameter>(std::move(names), tensor));
    parameter.shard_dim = dim;
    parameter.whole = whole || !unit->sharded();
    parameter.watch(unit, *unit);
    if (!parameter.whole) unit->make_shard(parameter);
  }
  unit->groups_ = group::Group::make(unit->parameters_, unit->setting());
  return unit;
}

Unit::~Unit() {
  std::erase(schedule_->open_, this);
  for (const auto& parameter : parameters_) {
    if (!parameter->whole) remove_shard(parameter->shard_identity());
  }
}

std::shared_ptr<Unit> Unit::of(const at::Tensor& parameter) {
  if (auto unit = unit_of_shard(parameter)) return unit;
  return std::static_pointer_cast<Unit>(group::Parameter::owner(parameter));
}

const char* Unit::kind() const {
  return kind_of(settings_);
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

group::Group::Setting Unit::setting() const {
  return {settings_.layout, gather_, settings_.front.get()};
}

void Unit::make_shard(group::Parameter& parameter) {
  const auto leaf = parameter.leaf();
  at::Tensor shard;
  {
    const group::ComputeGuard guard;
    // Of full size at first: its group, which knows who holds what, takes this rank's piece of it.
    shard = leaf.detach();
  }
  parameter.set_shard(shard.set_requires_grad(leaf.requires_grad()));
  add_shard(shard, weak_from_this());
}

void Unit::check_structure(const std::vector<NamedTensor>& own, size_t adopted) {
  if (gather_.size() == 1) return;
  if (agreement_) {
    const auto text = [&] {
      return c10::str(kind(), "() of ", own.empty() ? "no parameters" : own.front().names.front());
    };
    agreement_->enter(comm::Agreement::gathers, kWrapping, text, counters_);
    number_for_all_ = agreement_->next_number();
  }
  std::vector<std::string> lines;
  for (const auto& parameter : own) lines.push_back(line(parameter, sharded()));
  lines.push_back(c10::str("the end of a ", kind(), ", after ", adopted, " parameters of inner units"));
  compare_structure(lines, gather_, mesh_.device(), counters_);
}

// Inner units are renamed as seen from here: errors then give the full names of parameters.
void Unit::adopt(const std::vector<NamedTensor>& adopted) {
  std::map<at::TensorImpl*, const NamedTensor*> found;
  std::set<std::shared_ptr<Unit>> tops;
  const auto top_of = [](std::shared_ptr<Unit> unit) {
    while (unit->outer_) unit = unit->outer_;
    return unit;
  };
  for (const auto& parameter : adopted) {
    found[parameter.tensor.unsafeGetTensorImpl()] = &parameter;
    tops.insert(top_of(of(parameter.tensor)));
  }
  for (const auto& top : tops) {
    for (const auto& inner : top->tree()) {
      const auto prefix = inner->name_.empty() ? 0 : inner->name_.size() + 1;
      for (const auto& parameter : inner->parameters_) {
        const auto seen = found.find(parameter->visible().unsafeGetTensorImpl());
        if (seen == found.end()) {
          throw ValueError(c10::str(
              "shardwise: some parameters of this module belong to a unit that reaches outside of it (its parameter '",
              parameter->name(),
              "' does not lie below this module). Wrap inner modules first, outer ones after them; "
              "modules that share a parameter must be in one unit."));
        }
        const auto& names = seen->second->names;
        inner->name_ = path_before(names.front(), parameter->name().substr(prefix));
        parameter->rename(names);
      }
    }
    top->outer_ = shared_from_this();
    inner_.push_back(top);
    schedule_->take_over(*std::shared_ptr(top->schedule_));
  }
}

void Unit::broadcast(const std::vector<NamedTensor>& tensors) {
  if (gather_.size() == 1) return;
  const group::ComputeGuard guard;
  for (const auto& [names, tensor, dim, whole] : tensors) {
    auto values = tensor.detach();
    auto wire = values.is_non_overlapping_and_dense() ? values.as_strided({values.numel()}, {1}) : values.contiguous();
    gather_.broadcast(wire, 0, c10::str("the broadcast of '", names.front(), "' from rank 0"), counters_).wait();
    if (!wire.is_alias_of(values)) values.copy_(wire);
  }
}

std::vector<std::shared_ptr<Unit>> Unit::tree() const {
  auto units = schedule_->units();
  std::erase_if(units, [&](const auto& unit) { return unit.get() != this && !unit->lies_below(*this); });
  return units;
}

template <typename Do>
void Unit::for_full_copies(const Do& act) {
  for (const auto& group : groups_) {
    if (auto* copies = group->full_copies()) act(*copies);
  }
}

void Unit::enter(Keep keep) {
  schedule_->enter(*this, keep);
}

void Unit::leave() {
  schedule_->leave(*this);
}

void Unit::shard_written() {
  for_full_copies([](group::FullCopies& copies) { copies.mark_stale(); });
}

std::string Unit::parameter_at(const at::Tensor& tensor) const {
  for (const auto& group : groups_) {
    const auto* copies = group->full_copies();
    const auto* parameter = copies == nullptr ? nullptr : copies->find(tensor);
    if (parameter != nullptr) return parameter->name();
  }
  return "?";
}

std::string Unit::describe() const {
  const auto others = parameters_.empty() ? 0 : parameters_.size() - 1;
  return c10::str(
      "unit '", name_, "' (", parameters_.empty() ? "no parameters" : parameters_.front()->name(), " and ", others,
      " more parameters)");
}

comm::Collectives Unit::next(Step step) {
  const bool is_sum = step == Step::sum;
  const auto& collectives = is_sum ? reduce_ : gather_;
  if (!agreement_) return collectives;
  const auto chain = is_sum && separate_ ? comm::Agreement::sums : comm::Agreement::gathers;
  const auto text = [&] {
    const auto* what = is_sum ? "the sum of the gradients of " : "the all-gather of ";
    return what + describe() + (step == Step::gather_in_backward ? " in backward" : "");
  };
  constexpr int64_t kSteps = 3;
  const auto event = kSteps * number_for_all_ + static_cast<int64_t>(step);
  return collectives.at(agreement_->enter(chain, event, text, counters_));
}

const group::Parameter* Unit::parameter_of_shard(const at::Tensor& tensor) const {
  for (const auto& parameter : parameters_) {
    if (!parameter->whole && parameter->shard_identity() == tensor.unsafeGetTensorImpl()) return parameter.get();
  }
  return nullptr;
}

void Unit::begin_unshard() {
  if (!sharded()) return;
  renew_groups();
  bool all_there = true;
  for_full_copies([&](const group::FullCopies& copies) { all_there = all_there && !copies.must_gather(); });
  if (all_there) return;
  const auto gather = next(BackwardWatch::running() ? Step::gather_in_backward : Step::gather_in_forward);
  for_full_copies([&](group::FullCopies& copies) { copies.begin_unshard(gather, buffers(), name_, counters_); });
}

void Unit::finish_unshard() {
  bool written = false;
  for_full_copies(
      [&](group::FullCopies& copies) { written = copies.finish_unshard(buffers(), name_, counters_) || written; });
  if (!written) return;
  // While the old values were on the wire.
  begin_unshard();
  finish_unshard();
}

void Unit::reshard() {
  for_full_copies([&](group::FullCopies& copies) { copies.reshard(buffers(), counters_); });
}

void Unit::unshard(bool backward) {
  begin_unshard();
  finish_unshard();
  for (const auto& weak : backward ? options.backward_prefetch : options.forward_prefetch) {
    if (const auto unit = weak.lock()) unit->begin_unshard();
  }
}

bool Unit::reshards_after_forward() const {
  return options.reshard_after_forward.value_or(outer_ != nullptr);
}

void Unit::gradient_arriving(group::Parameter& parameter, bool defined) {
  schedule_->gradient_arriving(*this, parameter, defined);
}

void Unit::gradient_arrived(group::Parameter& parameter) {
  schedule_->gradient_arrived(*this, parameter);
}

// A replicated unit may be used on some ranks only, so that it takes part whenever its tree does. A sharded one runs on
// all ranks or on none.
bool Unit::takes_part() const {
  return !sharded() || backward.engaged;
}

bool Unit::gathers_where_it_reduces() const {
  return sharded() && !separate_ && gather_.size() > 1;
}

void Unit::begin_reduce() {
  ++counters_.backwards;
  averages_ = options.sync;
  if (!options.sync || gather_.size() == 1) return;
  const auto has_gradients = [](const auto& group) { return group->gradients() != nullptr; };
  if (std::none_of(groups_.begin(), groups_.end(), has_gradients)) return;
  const auto sum = next(Step::sum);
  for (const auto& group : groups_) {
    if (auto* gradients = group->gradients()) gradients->begin(sum, buffers(), name_, counters_);
  }
}

void Unit::wait_reduce() {
  for (const auto& group : groups_) {
    if (auto* gradients = group->gradients()) gradients->wait(buffers());
  }
}

void Unit::publish() {
  observe::pass(observe::Seam::publish);
  const auto averages = std::exchange(averages_, std::nullopt);
  if (!averages) return;
  if (!*averages) {
    for (const auto& parameter : parameters_) parameter->keep_for_later();
    return;
  }
  if (gather_.size() == 1) {
    const group::ComputeGuard guard;
    for (const auto& parameter : parameters_) {
      const auto local = parameter->take_local();
      parameter->settle();
      if (!local.defined()) continue;
      // In the layout `flat` a shard is a vector.
      parameter->publish(parameter->whole ? local : local.reshape(parameter->visible().sizes()));
    }
    return;
  }
  for (const auto& group : groups_) {
    auto* gradients = group->gradients();
    if (gradients != nullptr && gradients->under_way()) gradients->publish();
  }
}

void Unit::forget_backward() {
  averages_.reset();
  for (const auto& parameter : parameters_) parameter->forget_backward();
  for (const auto& group : groups_) {
    if (auto* gradients = group->gradients()) gradients->drop(buffers());
  }
}

void Unit::renew_groups() {
  const auto fits = [](const auto& group) { return group->fits(); };
  if (!std::all_of(groups_.begin(), groups_.end(), fits)) {
    reshard();
    // Where that fails, the old ones stay, and are found unfit again.
    auto renewed = group::Group::make(parameters_, setting());
    groups_ = std::move(renewed);
    return;
  }
  for (const auto& group : groups_) group->follow_requires_grad();
}

Plan Unit::plan() const {
  Plan plan;
  plan.mesh = mesh_.describe();
  for (const auto& unit : tree()) {
    Plan::Unit row{.name = unit->name_, .kind = unit->kind(), .groups = {}};
    for (const auto& group : unit->groups_) row.groups.push_back(group->plan());
    plan.units.push_back(std::move(row));
  }
  return plan;
}

Counters Unit::counters() const {
  Counters sum;
  for (const auto& unit : tree()) sum += unit->counters_;
  return sum;
}

} // namespace shardwise::engine
