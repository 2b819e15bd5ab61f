#include "engine/unit.h"

#include "base/compute_guard.h"
#include "base/fingerprint.h"
#include "base/on_host.h"
#include "comm/mesh/gather_texts.h"
#include "engine/trees.h"
#include "group/data.h"
#include "observe/record.h"

#include <shardwise/error.h>

#include <ATen/ops/detach.h>
#include <ATen/ops/tensor.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <sstream>
#include <utility>

namespace shardwise::engine {
namespace {

/// A word is a length in 32 bits, then LocalFindings::shared from bit kShared on, and LocalFindings::unheld at bit
/// kUnheld.
constexpr unsigned kShared = 32;
constexpr unsigned kUnheld = 62;
constexpr auto kWhat = "the comparison of the wrapped modules";

/// What one rank found out about its parameters that all ranks have to know.
struct LocalFindings {
  /// The number of the first parameter whose memory something else shares; -1: none.
  int64_t shared = -1;
  /// Whether there are parameters that only registries hold.
  bool unheld = false;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

[[noreturn]] void report(
    const std::vector<std::string>& first, const std::vector<std::string>& other, size_t rank, int64_t mine) {
  size_t i = 0;
  while (i < first.size() && i < other.size() && first[i] == other[i]) ++i;
  const auto line = [&](const auto& lines) { return i < lines.size() ? lines[i] : std::string("nothing"); };
  throw Error(c10::str(
      "shardwise: rank ", mine, ": the ranks wrap different modules. Parameter ", i, " of this unit is ", line(first),
      " on rank 0, but ", line(other), " on rank ", rank,
      ". Every rank must build the same model, and wrap the same modules in the same order."));
}

/// Compares `lines`, one for each parameter, with those of the other ranks along these axes. All ranks must call it. If
/// the lines differ, all raise the same Error, which quotes the first difference. Returns what each rank saw.
std::vector<LocalFindings> compare_structure(
    const std::vector<std::string>& lines, const LocalFindings& seen, const std::vector<comm::Collectives>& axes,
    int64_t rank, at::Device device, Counters& counters) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  // What was seen travels in the bits that the length leaves free.
  const auto rest = uint64_t{text.size()} | static_cast<uint64_t>(seen.shared + 1) << kShared |
                    (seen.unheld ? uint64_t{1} << kUnheld : 0);
  const auto head =
      at::tensor({static_cast<int64_t>(base::fingerprint(text)), static_cast<int64_t>(rest)}, base::on_host(at::kLong));
  const auto rows = comm::gather_rows(head, axes, device, kWhat, counters);
  std::vector<LocalFindings> all;
  bool same = true;
  const auto* heads = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < 2 * rows.size(0); i += 2) {
    const auto seen_there = static_cast<uint64_t>(heads[i + 1]);
    same = same && heads[i] == heads[0] && static_cast<uint32_t>(seen_there) == static_cast<uint32_t>(rest);
    const auto shared = (seen_there >> kShared) % (uint64_t{1} << (kUnheld - kShared));
    all.push_back({.shared = static_cast<int64_t>(shared) - 1, .unheld = seen_there >> kUnheld != 0});
  }
  if (same) return all;
  const auto texts = comm::gather_texts(text, axes, device, kWhat, counters);
  for (size_t i = 1; i < texts.size(); ++i) {
    if (texts[i] != texts[0]) report(split(texts[0]), split(texts[i]), i, rank);
  }
  return all;
}

/// For each of several yes-or-no questions, the same on all ranks: whether any rank says yes.
std::vector<bool> any_of_ranks(
    const std::vector<bool>& mine, const std::vector<comm::Collectives>& axes, at::Device device, Counters& counters) {
  const std::vector<int64_t> numbers(mine.begin(), mine.end());
  const auto rows = comm::gather_rows(at::tensor(numbers, base::on_host(at::kLong)), axes, device, kWhat, counters);
  std::vector<bool> any(mine.size(), false);
  for (int64_t rank = 0; rank < rows.size(0); ++rank) {
    const auto row = rows[rank];
    for (size_t i = 0; i < any.size(); ++i) any[i] = any[i] || row.const_data_ptr<int64_t>()[i] != 0;
  }
  return any;
}

std::atomic<int64_t> next_number = 0;

const char* kind_of(const UnitSettings& settings) {
  return settings.replicates ? "replicate" : "fully_shard";
}

void check_axes(const Mesh& mesh, const UnitSettings& settings) {
  const bool copies = settings.replicates;
  if (mesh.ndim() == 1 || (mesh.ndim() == 2 && !copies)) return;
  throw ValueError(c10::str(
      "shardwise: ", kind_of(settings), " expects a ", copies ? "1D" : "1D or 2D", " DeviceMesh but got ",
      mesh.describe(), ". Give it a mesh with one axis, the ranks that hold ",
      copies ? "copies."
             : "shards, or with two: the ranks that hold copies of the shards, then those that hold shards."));
}

std::string line(const NamedTensor& parameter, bool sharded) {
  const auto& tensor = parameter.full.defined() ? parameter.full : parameter.tensor;
  // No stream: this runs for every parameter.
  auto text = "'" + parameter.names.front() + "' ";
  text += c10::getDtypeNames(tensor.scalar_type()).first;
  text += " [";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) text += (dim > 0 ? ", " : "") + std::to_string(tensor.size(dim));
  text += ']';
  if (sharded) text += parameter.whole ? " whole" : " cut along " + std::to_string(parameter.shard_dim);
  if (!parameter.tensor.requires_grad()) text += " frozen";
  if (tensor.is_meta()) text += " on the meta device";
  return text;
}

void check_is_contiguous(const std::string& name, const at::Tensor& tensor, const char* kind) {
  if (tensor.is_contiguous()) return;
  throw ValueError(c10::str(
      "shardwise: ", kind, " does not support non-contiguous parameters yet: '", name, "' has sizes ", tensor.sizes(),
      " and strides ", tensor.strides(), ". Make it contiguous() before ", kind,
      "(). A convolution computes in channels_last even if only its input is."));
}

void check_can_be_laid_out(const NamedTensor& parameter, const char* kind, bool can_stay_whole) {
  if (parameter.whole) return;
  const auto& tensor = parameter.full.defined() ? parameter.full : parameter.tensor;
  const auto& name = parameter.names.front();
  if (tensor.layout() != at::kStrided) {
    throw ValueError(c10::str(
        "shardwise: the parameter '", name,
        "' is not a dense tensor; only dense tensors can be sharded or cast. Name it in ignored_parameters."));
  }
  if (tensor.dim() == 0) {
    throw ValueError(c10::str(
        "shardwise: ", kind, " doesn't support scalar parameters. Change ", name,
        " to a 1D tensor with numel equal to 1", can_stay_whole ? ", or name it in whole_parameters()" : "", "."));
  }
  check_is_contiguous(name, tensor, kind);
  if (parameter.shard_dim < 0 || parameter.shard_dim >= tensor.dim()) {
    throw ValueError(c10::str(
        "shardwise: '", name, "' has ", tensor.dim(), " dimensions and cannot be sharded along dimension ",
        parameter.shard_dim, ". shard_placement must return one that it has."));
  }
}

void check_holders(const Mesh& mesh, const UnitSettings& settings) {
  const auto& setting = settings.reshard_after_forward;
  if (!setting || !setting->ranks()) return;
  const auto count = *setting->ranks();
  const auto size = mesh.axes().back().size;
  if (count >= 1 && size % count == 0) return;
  throw ValueError(c10::str(
      "shardwise: reshard_after_forward is the number of ranks that hold full parameters together after forward: it "
      "should be a factor of ",
      size, ", the number of shards of ", mesh.describe(), ", not ", count, "."));
}

/// `full` without `local` at its end, and without the dot between them.
std::string path_before(const std::string& full, const std::string& local) {
  const auto size = full.size() - std::min(full.size(), local.size());
  return full.substr(0, size > 0 ? size - 1 : 0);
}

} // namespace

const char* Unit::kind() const {
  return kind_of(settings_);
}

at::ScalarType UnitSettings::full_dtype(at::ScalarType dtype, std::optional<at::ScalarType> own) const {
  if (!at::isFloatingType(dtype)) return dtype;
  return own ? *own : precision.param_dtype().value_or(dtype);
}

bool UnitSettings::shares(at::ScalarType dtype, at::ScalarType full, at::Device device) const {
  if (layout == group::Layout::replicate) return true;
  return replicates && !(offload && !device.is_cpu()) && dtype == full;
}

Unit::Unit(const Mesh& mesh, const UnitSettings& settings)
    : number_(next_number++),
      mesh_(mesh),
      settings_(settings),
      ranks_(mesh, settings.replicates, settings.custom_on_mesh),
      schedule_(std::make_shared<Schedule>(number_)) {}

// With a count of 1 each rank holds everything, and full copies stay. With all ranks this is ordinary resharding.
void Unit::find_neighbours() {
  const auto& setting = settings_.reshard_after_forward;
  if (!setting || !setting->ranks()) return;
  const int64_t count = *setting->ranks();
  if (count == 1) {
    TORCH_WARN_ONCE("shardwise: reshard_after_forward(1) keeps full parameters on each rank, as false does.");
    timing().reshard_after_forward = false;
  }
  if (count != 1 && count != shards().size()) ranks_.make_neighbours(count, settings_.neighbours);
}

std::shared_ptr<Unit> Unit::create(
    const Mesh& mesh, std::vector<NamedTensor> parameters, const std::vector<NamedTensor>& buffers,
    const UnitSettings& settings) {
  observe::open_program_record(mesh.rank());
  check_axes(mesh, settings);
  check_holders(mesh, settings);
  std::shared_ptr<Unit> unit(new Unit(mesh, settings));
  std::vector<NamedTensor> own;
  std::vector<NamedTensor> adopted;
  for (auto& parameter : parameters) (of(parameter.tensor) ? adopted : own).push_back(std::move(parameter));
  unit->check_structure(own, buffers, adopted.size());
  if (unit->has_full_copies()) {
    for (const auto& parameter : own) check_can_be_laid_out(parameter, unit->kind(), !unit->replicates());
  }
  unit->ranks_.make_groups();
  // A replicated unit may be used on some ranks only, so it takes part whenever its tree does. A sharded unit runs on
  // all ranks or on none.
  UnitTiming timing{
      .unshard_in_backward = settings.front_end != nullptr,
      .is_gathered = unit->shards().size() > 1,
      .always_sums = settings.replicates,
      .sums_in_stream = unit->ranks_.wait_in_stream(),
      .is_companion = settings.is_companion};
  if (settings.reshard_after_forward) timing.reshard_after_forward = settings.reshard_after_forward->frees();
  unit->schedule_->add(unit, timing);
  add_to_tree(*unit, unit->schedule_);
  unit->adopt(adopted);
  if (settings.broadcast) {
    unit->broadcast(own);
    unit->broadcast(buffers);
  }
  if (!unit->replicates()) unit->find_neighbours();
  for (auto& named : own) {
    auto& parameter = *unit->parameters_.emplace_back(
        std::make_unique<group::Parameter>(std::move(named.names), named.tensor, named.full));
    parameter.index = unit->parameters_.size() - 1;
    parameter.shard_dim = named.shard_dim;
    parameter.full_dtype = named.full_dtype;
    parameter.grad_dtype = named.grad_dtype;
    parameter.set_extension(std::move(named.extension));
    parameter.whole = named.whole || !unit->has_full_copies();
    parameter.watch(unit, *unit);
    if (!parameter.whole) unit->make_shard(parameter, named.values.defined() ? named.values : parameter.full());
  }
  unit->groups_ = group::Group::make(unit->parameters_, unit->setting(/*takes_memory=*/true));
  return unit;
}

void Unit::make_shard(group::Parameter& parameter, const at::Tensor& values) {
  // The shard has full size at first: its group, which knows the layout, takes this rank's piece of it.
  const auto shard = base::guarded([&] { return values.detach(); });
  parameter.set_shard(shard.set_requires_grad(parameter.leaf_requires_grad()));
  if (parameter.grad_dtype) shard.set_grad_dtype(parameter.grad_dtype);
  add_shard(shard);
}

void Unit::replace_shard(size_t index, const at::Tensor& shard, std::shared_ptr<group::VisibleParameter> visible) {
  auto& parameter = *parameters_.at(index);
  const auto dtype = shard.scalar_type();
  const bool is_shared = !parameter.extension() &&
                         settings_.shares(dtype, settings_.full_dtype(dtype, parameter.full_dtype), mesh_.device());
  if (parameter.whole && !is_shared) check_is_contiguous(parameter.name(), shard, kind());
  seen_.resize(parameters_.size());
  remove_shard(seen_[index]);
  remove_shard(parameter.shard_identity());
  // A cast may have given it the dtype to compute in, or another one.
  const bool was_shared = std::exchange(parameter.whole, is_shared);
  parameter.set_shard(is_shared ? at::Tensor() : shard);
  if (!is_shared) {
    add_shard(shard);
  } else if (!was_shared || !shard.is_alias_of(parameter.full()) || shard.dtype() != parameter.full().dtype()) {
    group::replace_data(parameter.full(), shard);
  }
  if (is_shared) parameter.keep_memory(shard);
  parameter.set_visible(std::move(visible));
  seen_[index] = parameter.visible().unsafeGetTensorImpl();
  add_shard(parameter.visible());
}

void Unit::check_structure(std::vector<NamedTensor>& own, const std::vector<NamedTensor>& buffers, size_t adopted) {
  LocalFindings seen;
  std::vector<bool> unheld;
  for (size_t i = 0; i < own.size(); ++i) {
    if (own[i].shared && seen.shared < 0) seen.shared = static_cast<int64_t>(i);
    seen.unheld = seen.unheld || own[i].unheld;
    unheld.push_back(own[i].unheld);
  }
  std::vector<LocalFindings> all{seen};
  const auto world = ranks_.world();
  if (world > 1) {
    if (const auto& agreement = ranks_.agreement()) {
      const auto text = [&] {
        return c10::str(kind(), "() of ", own.empty() ? "no parameters" : own.front().names.front());
      };
      agreement->enter(comm::Agreement::group, comm::Agreement::kWrapping, text, counters_);
      number_for_all_ = agreement->next_number();
    }
    std::vector<std::string> lines;
    for (const auto& parameter : own) lines.push_back(line(parameter, !replicates()));
    for (const auto& buffer : buffers) {
      if (buffer.tensor.is_meta()) lines.push_back(c10::str("the buffer ", line(buffer, false)));
    }
    lines.push_back(
        c10::str("no more parameters (", kind(), "() of a module with ", adopted, " parameters of inner units)"));
    all = compare_structure(lines, seen, ranks_.axes(), mesh_.rank(), mesh_.device(), counters_);
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].shared >= 0) refuse_shared(own.at(all[rank].shared), world > 1 ? rank : mesh_.rank());
  }
  // Unheld on one rank means unheld on all: on the others something besides the modules refers to it.
  if (std::none_of(all.begin(), all.end(), [](const auto& one) { return one.unheld; })) return;
  if (world > 1) unheld = any_of_ranks(unheld, ranks_.axes(), mesh_.device(), counters_);
  for (size_t i = 0; i < own.size(); ++i) own[i].whole = own[i].whole || unheld[i];
}

void Unit::refuse_shared(const NamedTensor& parameter, size_t rank) const {
  throw Error(c10::str(
      "shardwise: rank ", rank, ": the memory of the parameter '", parameter.names.front(),
      "' is shared with a tensor that ", kind(),
      "() does not know: a view or an alias made earlier (weight.t(), detach()), another parameter or buffer, "
      "or the graph of an old loss. Such a tensor would keep its current values while the parameter trains. Make views "
      "in forward(), clone() values that must stay, and drop old losses before wrapping. If nothing computes with the "
      "tensor, set allow_aliases(true)."));
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
          const auto shared = std::find_if(
              adopted.begin(), adopted.end(), [&](const auto& each) { return top_of(of(each.tensor)) == top; });
          throw ValueError(c10::str(
              "shardwise: a unit has parameters both inside and outside this module: '", shared->names.front(),
              "' of this module is in the unit, and '", parameter->name(),
              "' of the unit is not in this module. Wrap inner modules before outer ones; wrap models that share a "
              "layer together, in one call."));
        }
        const auto& names = seen->second->names;
        inner->name_ = path_before(names.front(), parameter->name().substr(prefix));
        parameter->rename(names);
      }
      if (inner->settings_.front_end) {
        for (const auto& group : inner->groups_) {
          if (auto* copies = group->full_copies()) copies->name_storages(*inner->settings_.front_end);
        }
      }
    }
    top->outer_ = shared_from_this();
    schedule_->take_over(*std::shared_ptr(top->schedule_), *this);
  }
}

void Unit::broadcast(const std::vector<NamedTensor>& tensors) {
  if (ranks_.world() == 1) return;
  const base::ComputeGuard guard;
  for (const auto& parameter : tensors) {
    if (parameter.tensor.is_meta()) continue;
    auto values = parameter.tensor.detach();
    auto wire = values.is_non_overlapping_and_dense() ? values.as_strided({values.numel()}, {1}) : values.contiguous();
    ranks_.broadcast_from_first(
        wire, c10::str("the broadcast of '", parameter.names.front(), "' from rank 0"), counters_);
    if (!wire.is_alias_of(values)) values.copy_(wire);
  }
}

} // namespace shardwise::engine
