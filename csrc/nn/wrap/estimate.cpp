#include <shardwise/estimate.h>

#include "engine/front_end.h"
#include "nn/wrap/module_walk.h"
#include "nn/wrap/owners.h"
#include "nn/wrap/wrapping.h"

#include <shardwise/error.h>

#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <set>
#include <unordered_map>

namespace shardwise {
namespace {

using engine::MemoryOutline;
using EventKind = engine::StepEvent::Kind;

bool contains(const torch::nn::Module& module, const torch::nn::Module* other) {
  bool found = false;
  module.apply([&](const torch::nn::Module& part) { found = found || &part == other; });
  return found;
}

/// Makes the outline of a module. Keeps no handles on its tensors, since find_owners() counts handles.
class Outliner {
 public:
  Outliner(
      const torch::nn::Module& module, const engine::MemoryPolicy& policy, const FullyShardOptions& options,
      const std::vector<const torch::nn::Module*>& units)
      : policy_(policy),
        options_(options),
        modules_(units) {
    for (const auto* inner : modules_) {
      if (inner == nullptr || inner == &module || !contains(module, inner)) {
        throw ValueError(c10::str(
            "shardwise: estimate: a module in units() does not lie below this ", module.name(),
            ". List only modules below it; it is the outermost unit itself."));
      }
    }
    modules_.push_back(&module);
    module.apply([&](const torch::nn::Module& part) {
      const bool is_table = part.as<torch::nn::EmbeddingImpl>() || part.as<torch::nn::EmbeddingBagImpl>();
      if (is_table) return;
      for (const auto& own : part.parameters(/*recurse=*/false)) computed_.insert(own.unsafeGetTensorImpl());
    });
    for (size_t unit = 0; unit < modules_.size(); ++unit) add_unit(unit);
    walk(module);
    for (const auto& buffer : nn::walk(module).buffers) {
      outline_.buffer_bytes += static_cast<int64_t>(buffer.tensor.nbytes());
    }
  }

  const MemoryOutline& outline() const {
    return outline_;
  }

 private:
  void add_unit(size_t number) {
    // The parameters below the unit's module that no earlier unit has.
    auto parameters = nn::walk(*modules_[number]).parameters;
    std::erase_if(parameters, [&](const auto& parameter) {
      return numbers_.contains(parameter.tensor.unsafeGetTensorImpl()) ||
             nn::is_among(options_.ignored_parameters(), parameter.tensor);
    });
    for (const auto& parameter : parameters) {
      if (!engine::Unit::of(parameter.tensor)) continue;
      throw Error(c10::str(
          "shardwise: estimate: the parameter '", parameter.names.front(),
          "' belongs to a unit already. Estimate before fully_shard() or replicate(), or use plan()."));
    }
    nn::choose_dtypes(parameters, policy_.precision);
    MemoryOutline::Unit unit;
    unit.has_full_copies = !policy_.replicates || nn::is_cast(parameters, policy_.precision);
    if (unit.has_full_copies) nn::find_owners({modules_[number]}, options_.whole_parameters(), parameters);
    if (!policy_.replicates) nn::choose_dims(parameters, options_.shard_placement());
    for (const auto& parameter : parameters) {
      const auto& tensor = parameter.tensor;
      unit.parameters.push_back(outline_.parameters.size());
      numbers_[tensor.unsafeGetTensorImpl()] = outline_.parameters.size();
      outline_.parameters.push_back(
          {tensor.sizes().vec(), tensor.scalar_type(), parameter.shard_dim, parameter.whole || parameter.unheld,
           parameter.full_dtype, tensor.requires_grad(), !computed_.contains(tensor.unsafeGetTensorImpl())});
    }
    for (size_t outer = number + 1; outer < modules_.size() && !unit.outer; ++outer) {
      if (contains(*modules_[outer], modules_[number])) unit.outer = outer;
    }
    outline_.units.push_back(std::move(unit));
  }

  /// Notes the order in which a forward uses parameters, taken to be the order in which they are registered.
  void walk(const torch::nn::Module& module) {
    const auto unit = std::find(modules_.begin(), modules_.end(), &module);
    const auto number = static_cast<size_t>(unit - modules_.begin());
    if (unit != modules_.end()) outline_.forward.push_back({EventKind::begin, number});
    for (const auto& entry : module.named_parameters(/*recurse=*/false)) {
      const auto known = numbers_.find(entry.value().unsafeGetTensorImpl());
      if (known == numbers_.end() || !used_.insert(known->second).second) continue;
      outline_.forward.push_back({EventKind::use, known->second});
    }
    for (const auto& child : module.named_children()) walk(*child.value());
    if (unit != modules_.end()) outline_.forward.push_back({EventKind::end, number});
  }

  const engine::MemoryPolicy& policy_;
  const FullyShardOptions& options_;
  std::vector<const torch::nn::Module*> modules_;
  std::unordered_map<const at::TensorImpl*, size_t> numbers_;
  std::set<size_t> used_;
  /// The parameters that a module other than an embedding has.
  std::set<const at::TensorImpl*> computed_;
  MemoryOutline outline_;
};

template <typename Estimate>
auto estimate(
    const torch::nn::Module& module, const FullyShardOptions& options, bool replicates, int64_t world,
    const EstimateOptions& more, const Estimate& of) {
  if (options.parameter_mesh()) {
    throw ValueError(
        "shardwise: estimate: parameter_mesh() is not supported: all parameters are taken to lie on one mesh. "
        "Leave it out for an estimate with all on the same mesh.");
  }
  engine::MemoryPolicy policy;
  policy.replicates = replicates;
  policy.is_flat = options.layout() == ShardLayout::flat;
  policy.precision = options.mixed_precision();
  policy.reshard = options.reshard_after_forward();
  policy.sums_in_flight = more.reduce_scatter_max_input_buffers();
  policy.sums_in_stream = engine::sums_in_stream_on(more.device());
  policy.keeps_full = more.keep_unsharded_storage();
  engine::set_ranks(policy, world, more.copies(), more.rank(), more.optimizer_factor());
  const Outliner outliner(module, policy, options, more.units());
  return of(outliner.outline(), policy);
}

template <typename Estimate>
auto estimate(
    const torch::nn::Module& module, const ReplicateOptions& options, bool replicates, int64_t world,
    const EstimateOptions& more, const Estimate& of) {
  const auto alike = FullyShardOptions()
                         .mixed_precision(options.mixed_precision())
                         .reshard_after_forward(ReshardAfterForward(false))
                         .ignored_parameters(options.ignored_parameters());
  return estimate(module, alike, replicates, world, more, of);
}

auto time_over(const Links& links, double compute) {
  return [&links, compute](const auto& outline, const auto& policy) {
    return engine::estimate_time(outline, policy, links, compute);
  };
}

} // namespace

MemoryEstimate estimate_memory(
    const torch::nn::Module& module, const FullyShardOptions& options, int64_t world, const EstimateOptions& more) {
  return estimate(module, options, /*replicates=*/false, world, more, &engine::estimate);
}

MemoryEstimate estimate_memory(
    const torch::nn::Module& module, const ReplicateOptions& options, int64_t world, const EstimateOptions& more) {
  return estimate(module, options, /*replicates=*/true, world, more, &engine::estimate);
}

TimeEstimate estimate_time(
    const torch::nn::Module& module, const FullyShardOptions& options, int64_t world, const Links& links,
    double compute, const EstimateOptions& more) {
  return estimate(module, options, /*replicates=*/false, world, more, time_over(links, compute));
}

TimeEstimate estimate_time(
    const torch::nn::Module& module, const ReplicateOptions& options, int64_t world, const Links& links, double compute,
    const EstimateOptions& more) {
  return estimate(module, options, /*replicates=*/true, world, more, time_over(links, compute));
}

} // namespace shardwise
