#include <shardwise/estimate.h>

#include "engine/step_memory.h"
#include "group/outline.h"
#include "layout/shards.h"
#include "nn/module_walk.h"
#include "nn/wrapping.h"

#include <shardwise/error.h>

#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <unordered_map>

namespace shardwise {
namespace {

using engine::StepEvent;

/// What both functions' options come to.
struct Setting {
  bool replicates = false;
  bool is_flat = false;
  FullyShardOptions::Placement placement;
  MixedPrecision precision;
  std::optional<ReshardAfterForward> reshard;
  std::vector<at::Tensor> ignored;
  int64_t shards = 1;
  int64_t copies = 1;
  int64_t rank = 0;
};

/// A parameter without a handle on its tensor: who holds it is counted.
struct Item {
  const at::TensorImpl* identity;
  std::vector<int64_t> sizes;
  at::ScalarType dtype;
  int64_t dim;
  bool whole;
  bool trained;
};

int64_t bytes_of(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

int64_t count(const Item& item) {
  int64_t numel = 1;
  for (const auto size : item.sizes) numel *= size;
  return numel;
}

/// In the end all are on the device of the mesh.
group::Kind kind_of(const Item& item) {
  return {item.dtype, at::kCPU, item.whole};
}

void check(int64_t world, const EstimateOptions& more) {
  if (world < 1 || more.copies() < 1 || world % more.copies() != 0) {
    throw ValueError(c10::str(
        "shardwise: estimate_memory() for ", world, " ranks, ", more.copies(),
        " of which hold copies of each shard: the number of copies must be a divisor of the number of ranks."));
  }
  if (more.rank() < 0 || more.rank() >= world / more.copies()) {
    throw ValueError(c10::str(
        "shardwise: estimate_memory() for rank ", more.rank(), " of ", world / more.copies(),
        " that hold shards: it must be one of them, counted from 0."));
  }
  if (!(more.optimizer_factor() >= 0)) {
    throw ValueError(c10::str(
        "shardwise: estimate_memory(): optimizer_factor is ", more.optimizer_factor(), "; it must be 0 or more."));
  }
}

bool contains(const torch::nn::Module& module, const torch::nn::Module* other) {
  if (&module == other) return true;
  const auto children = module.named_children();
  return std::any_of(
      children.begin(), children.end(), [&](const auto& child) { return contains(*child.value(), other); });
}

class Estimate {
 public:
  Estimate(const torch::nn::Module& module, Setting setting, const EstimateOptions& more)
      : setting_(std::move(setting)),
        modules_(more.units()) {
    for (const auto* inner : modules_) {
      if (inner == nullptr || inner == &module || !contains(module, inner)) {
        throw ValueError(c10::str(
            "shardwise: estimate_memory() of this ", module.name(),
            ": a module of units() is not inside of it. Name "
            "modules below it; it becomes the outermost unit itself."));
      }
    }
    modules_.push_back(&module);
    for (size_t unit = 0; unit < modules_.size(); ++unit) add_unit(unit);
    walk(module);
    for (const auto& buffer : nn::walk(module).buffers) {
      result_.buffers += static_cast<int64_t>(buffer.tensor.nbytes());
    }
    result_.optimizer = static_cast<int64_t>(static_cast<double>(trained_) * more.optimizer_factor());
  }

  MemoryEstimate result() {
    const auto peaks = engine::walk_steps(units_, events_);
    result_.pool = peaks.pool;
    result_.local_gradients = peaks.local_gradients;
    result_.gradients = sums_ + means_;
    const auto always = result_.parameters + result_.buffers + result_.optimizer + sums_;
    result_.forward_peak = always + peaks.forward;
    result_.after_step = always + means_ + peaks.pool;
    result_.backward_peak = std::max(always + peaks.backward, result_.after_step);
    return result_;
  }

 private:
  bool is_alone() const {
    return setting_.shards * setting_.copies == 1;
  }

  /// Those below the unit's module that no unit before has.
  std::vector<Item> take_items(size_t unit, bool& has_full_copies) {
    auto parameters = nn::walk(*modules_[unit]).parameters;
    std::erase_if(parameters, [&](const auto& parameter) {
      return owners_.contains(parameter.tensor.unsafeGetTensorImpl()) ||
             std::any_of(setting_.ignored.begin(), setting_.ignored.end(), [&](const auto& ignored) {
               return ignored.is_same(parameter.tensor);
             });
    });
    for (const auto& parameter : parameters) {
      if (!engine::Unit::of(parameter.tensor)) continue;
      throw Error(c10::str(
          "shardwise: estimate_memory(): the parameter '", parameter.names.front(),
          "' belongs to a unit already. Ask before fully_shard() or replicate() is called, or ask the unit's plan()."));
    }
    has_full_copies = !setting_.replicates || nn::is_cast(parameters, setting_.precision);
    if (has_full_copies) nn::keep_whole_what_only_the_registry_holds({modules_[unit]}, parameters);
    if (!setting_.replicates) nn::place(parameters, setting_.placement);
    std::vector<Item> items;
    for (const auto& [names, tensor, dim, whole, full, values] : parameters) {
      owners_[tensor.unsafeGetTensorImpl()] = unit;
      items.push_back(
          {tensor.unsafeGetTensorImpl(), tensor.sizes().vec(), tensor.scalar_type(), dim, whole || !has_full_copies,
           tensor.requires_grad()});
    }
    return items;
  }

  void add_unit(size_t unit) {
    engine::UnitBytes row;
    const auto items = take_items(unit, row.has_full_copies);
    for (size_t outer = unit + 1; outer < modules_.size() && !row.outer; ++outer) {
      if (contains(*modules_[outer], modules_[unit])) row.outer = outer;
    }
    const auto& reshard = setting_.reshard;
    row.reshards_after_forward =
        reshard ? reshard->frees() && reshard->ranks() != 1 : !setting_.replicates && row.outer.has_value();
    for (const auto& group : group::by_kind(items, kind_of)) row.groups.push_back(add_group(group));
    row.has_full_copies = row.has_full_copies && !items.empty();
    row.is_gathered = row.has_full_copies && setting_.shards > 1;
    row.is_summed = !is_alone();
    units_.push_back(std::move(row));
  }

  static layout::Shards lay_out(const std::vector<Item>& items, const group::Outline& outline) {
    std::vector<std::vector<int64_t>> shapes;
    std::vector<int64_t> dims;
    for (const auto& item : items) {
      shapes.push_back(item.sizes);
      dims.push_back(item.dim);
    }
    return outline.lay_out(shapes, dims);
  }

  engine::GroupBytes add_group(const std::vector<Item>& items) {
    const auto whole = items.front().whole;
    const group::Outline outline(
        kind_of(items.front()), {setting_.is_flat ? group::Layout::flat : group::Layout::rows, setting_.shards,
                                 setting_.precision.param_dtype, setting_.precision.reduce_dtype});
    const auto own = outline.dtype();
    const auto compute = outline.full_dtype();
    const auto sum = outline.sum_dtype();
    const auto layout = lay_out(items, outline);
    const auto rank = whole ? 0 : std::min(setting_.rank, layout.world - 1);
    const auto part = layout.part * bytes_of(compute);
    engine::GroupBytes bytes;
    if (!whole) {
      result_.parameters += layout.part * bytes_of(own);
      for (const auto& item : items)
        bytes.full += static_cast<int64_t>(layout::aligned(count(item) * bytes_of(compute)));
      if (setting_.is_flat) bytes.full = layout.world * part;
      if (!setting_.is_flat && layout.world > 1) bytes.gathered = layout.world * part;
      if (layout.world > 1 && compute != own) bytes.sent = part;
      const auto holders = setting_.reshard && setting_.reshard->ranks() ? *setting_.reshard->ranks() : 1;
      if (holders > 1 && holders < layout.world) bytes.held = layout.world / holders * part;
    }
    std::vector<size_t> trained;
    for (size_t i = 0; i < items.size(); ++i) {
      if (whole) result_.parameters += count(items[i]) * bytes_of(own);
      if (!items[i].trained) continue;
      trained.push_back(i);
      const auto piece = layout.cuts[i].piece_numel(rank) * bytes_of(own);
      trained_ += piece;
      gradients_[items[i].identity] = count(items[i]) * bytes_of(compute);
      if (sum != own || is_alone()) means_ += piece;
    }
    if (trained.empty() || is_alone()) return bytes;
    const auto some = outline.lay_out_some(layout, trained);
    const auto segment = (some.part + static_cast<int64_t>(trained.size())) * bytes_of(sum);
    sums_ += segment;
    if (layout.world > 1) bytes.bucket = layout.world * segment;
    return bytes;
  }

  /// The order in which a forward uses parameters, as they are registered.
  void walk(const torch::nn::Module& module) {
    const auto unit = std::find(modules_.begin(), modules_.end(), &module);
    const auto number = static_cast<size_t>(unit - modules_.begin());
    if (unit != modules_.end()) events_.push_back({StepEvent::Kind::begin, number});
    for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
      const auto owner = owners_.find(entry.value().unsafeGetTensorImpl());
      if (owner == owners_.end() || !used_.insert(owner->first).second) continue;
      const auto gradient = gradients_.find(owner->first);
      events_.push_back({StepEvent::Kind::use, owner->second, gradient == gradients_.end() ? 0 : gradient->second});
    }
    for (const auto& child : module.named_children()) walk(*child.value());
    if (unit != modules_.end()) events_.push_back({StepEvent::Kind::end, number});
  }

  Setting setting_;
  std::vector<const torch::nn::Module*> modules_;
  std::unordered_map<const at::TensorImpl*, size_t> owners_;
  std::unordered_map<const at::TensorImpl*, int64_t> gradients_;
  std::set<const at::TensorImpl*> used_;
  std::vector<engine::UnitBytes> units_;
  std::vector<StepEvent> events_;
  int64_t trained_ = 0;
  int64_t sums_ = 0;
  int64_t means_ = 0;
  MemoryEstimate result_;
};

} // namespace

MemoryEstimate estimate_memory(
    const torch::nn::Module& module, const FullyShardOptions& options, int64_t world, const EstimateOptions& more) {
  check(world, more);
  return Estimate(
             module,
             {.replicates = false,
              .is_flat = options.layout() == ShardLayout::flat,
              .placement = options.shard_placement(),
              .precision = options.mixed_precision(),
              .reshard = options.reshard_after_forward(),
              .ignored = options.ignored_parameters(),
              .shards = world / more.copies(),
              .copies = more.copies(),
              .rank = more.rank()},
             more)
      .result();
}

MemoryEstimate estimate_memory(
    const torch::nn::Module& module, const ReplicateOptions& options, int64_t world, const EstimateOptions& more) {
  check(world, more);
  return Estimate(
             module,
             {.replicates = true,
              .is_flat = false,
              .placement = {},
              .precision = options.mixed_precision(),
              .reshard = ReshardAfterForward(false),
              .ignored = options.ignored_parameters(),
              .shards = 1,
              .copies = world,
              .rank = 0},
             more)
      .result();
}

} // namespace shardwise
