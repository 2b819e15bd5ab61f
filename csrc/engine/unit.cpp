#include "engine/unit.h"

#include "engine/backward_watch.h"
#include "engine/structure.h"
#include "group/compute_guard.h"

#include <shardwise/error.h>

#include <ATen/ops/detach.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <set>

namespace shardwise::engine {
namespace {

std::atomic<int64_t> next_number = 0;

const c10::intrusive_ptr<c10d::ProcessGroup>& only_group(const Mesh& mesh) {
  if (mesh.ndim() != 1) {
    throw ValueError(c10::str(
        "shardwise: replicate expects a 1D DeviceMesh but got ", mesh.describe(),
        ". Give it a mesh of one axis, over the ranks that are to hold copies."));
  }
  return mesh.group(mesh.axes().front().name);
}

std::string line(const NamedTensor& parameter) {
  const auto& tensor = parameter.tensor;
  return c10::str(
      "'", parameter.names.front(), "' ", c10::getDtypeNames(tensor.scalar_type()).first, " ", tensor.sizes(),
      tensor.requires_grad() ? "" : " frozen");
}

/// `full` ends with `local`: what stands before it, without the dot.
std::string path_before(const std::string& full, const std::string& local) {
  const auto size = full.size() - std::min(full.size(), local.size());
  return full.substr(0, size > 0 ? size - 1 : 0);
}

} // namespace

Unit::Unit(Mesh mesh) : number_(next_number++), mesh_(std::move(mesh)), collectives_(only_group(mesh_)) {}

std::shared_ptr<Unit> Unit::create(
    Mesh mesh, std::vector<NamedTensor> parameters, const std::vector<NamedTensor>& buffers, bool broadcast) {
  std::shared_ptr<Unit> unit(new Unit(std::move(mesh)));
  std::vector<NamedTensor> own;
  std::vector<NamedTensor> adopted;
  for (auto& parameter : parameters) (of(parameter.tensor) ? adopted : own).push_back(std::move(parameter));
  unit->check_structure(own, adopted.size());
  unit->adopt(adopted);
  if (broadcast) {
    unit->broadcast(own);
    unit->broadcast(buffers);
  }
  for (auto& [names, tensor] : own) {
    unit->parameters_.push_back(std::make_unique<group::Parameter>(std::move(names), tensor));
    unit->parameters_.back()->watch(unit, *unit);
  }
  unit->renew_groups();
  return unit;
}

std::shared_ptr<Unit> Unit::of(const at::Tensor& parameter) {
  return std::static_pointer_cast<Unit>(group::Parameter::owner(parameter));
}

std::shared_ptr<Unit> Unit::top() {
  return outer_ ? outer_->top() : shared_from_this();
}

bool Unit::has(const at::Tensor& parameter) const {
  const auto unit = of(parameter);
  const auto units = tree();
  return std::find(units.begin(), units.end(), unit) != units.end();
}

void Unit::check_structure(const std::vector<NamedTensor>& own, size_t adopted) {
  if (collectives_.size() == 1) return;
  std::vector<std::string> lines;
  for (const auto& parameter : own) lines.push_back(line(parameter));
  lines.push_back(c10::str("the end, after ", adopted, " parameters of inner units"));
  compare_structure(lines, collectives_, mesh_.device(), counters_);
}

// Inner units are renamed as seen from here: errors then give the full names of parameters.
void Unit::adopt(const std::vector<NamedTensor>& adopted) {
  std::map<at::TensorImpl*, const NamedTensor*> found;
  std::set<std::shared_ptr<Unit>> tops;
  for (const auto& parameter : adopted) {
    found[parameter.tensor.unsafeGetTensorImpl()] = &parameter;
    tops.insert(of(parameter.tensor)->top());
  }
  for (const auto& top : tops) {
    for (const auto& inner : top->tree()) {
      const auto prefix = inner->name_.empty() ? 0 : inner->name_.size() + 1;
      for (const auto& parameter : inner->parameters_) {
        const auto seen = found.find(parameter->leaf().unsafeGetTensorImpl());
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
  }
}

void Unit::broadcast(const std::vector<NamedTensor>& tensors) {
  if (collectives_.size() == 1) return;
  const group::ComputeGuard guard;
  for (const auto& [names, tensor] : tensors) {
    auto values = tensor.detach();
    auto wire = values.is_non_overlapping_and_dense() ? values.as_strided({values.numel()}, {1}) : values.contiguous();
    collectives_.broadcast(wire, 0, c10::str("the broadcast of '", names.front(), "' from rank 0"), counters_).wait();
    if (!wire.is_alias_of(values)) values.copy_(wire);
  }
}

std::vector<std::shared_ptr<Unit>> Unit::tree() const {
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto& weak : inner_) {
    const auto inner = weak.lock();
    if (!inner) continue;
    const auto below = inner->tree();
    units.insert(units.end(), below.begin(), below.end());
  }
  units.push_back(std::const_pointer_cast<Unit>(shared_from_this()));
  std::sort(units.begin(), units.end(), [](const auto& a, const auto& b) { return a->number() < b->number(); });
  return units;
}

void Unit::gradient_arriving() {
  BackwardWatch::current()->arriving(top());
}

void Unit::gradient_arrived() {
  BackwardWatch::current()->arrived(top());
}

void Unit::average() {
  const auto units = tree();
  for (const auto& unit : units) unit->begin_average();
  for (const auto& unit : units) unit->finish_average();
}

void Unit::begin_average() {
  ++counters_.backwards;
  if (!sync_) {
    for (const auto& parameter : parameters_) parameter->keep_for_later();
    return;
  }
  renew_groups();
  if (collectives_.size() == 1) return;
  for (auto& group : groups_) group.begin_reduce(collectives_, name_, counters_);
}

void Unit::renew_groups() {
  std::vector<group::Parameter*> trained;
  for (const auto& parameter : parameters_) {
    if (parameter->leaf().requires_grad()) {
      trained.push_back(parameter.get());
    } else {
      parameter->forget_backward();
    }
  }
  const auto fits = [](const group::Group& group) { return group.fits(); };
  if (trained == trained_ && std::all_of(groups_.begin(), groups_.end(), fits)) return;
  groups_ = group::Group::make(trained);
  trained_ = std::move(trained);
}

void Unit::finish_average() {
  if (!sync_) return;
  if (collectives_.size() == 1) {
    for (const auto& parameter : parameters_) {
      const auto local = parameter->take_local();
      if (local.defined()) parameter->publish(local);
    }
    return;
  }
  for (auto& group : groups_) group.finish_reduce();
}

void Unit::forget_backward() {
  for (const auto& unit : tree()) {
    for (const auto& parameter : unit->parameters_) parameter->forget_backward();
  }
}

void Unit::set_sync(bool value, bool recurse) {
  sync_ = value;
  if (!recurse) return;
  for (const auto& unit : tree()) unit->sync_ = value;
}

Plan Unit::plan() const {
  Plan plan;
  plan.mesh = mesh_.describe();
  for (const auto& unit : tree()) {
    Plan::Unit row{.name = unit->name_, .kind = "replicate", .groups = {}};
    for (const auto& group : unit->groups_) row.groups.push_back(group.plan());
    plan.units.push_back(std::move(row));
  }
  return plan;
}

Counters Unit::counters() const {
  Counters sum;
  for (const auto& unit : tree()) {
    const auto& part = unit->counters_;
    sum.backwards = std::max(sum.backwards, part.backwards);
    sum.all_reduces += part.all_reduces;
    sum.broadcasts += part.broadcasts;
    sum.all_gathers += part.all_gathers;
    sum.collective_bytes += part.collective_bytes;
    sum.copied_bytes += part.copied_bytes;
    sum.allocations += part.allocations;
  }
  return sum;
}

} // namespace shardwise::engine
