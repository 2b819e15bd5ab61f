#pragma once

#include "nn/wrap/module_walk.h"
#include "split/split_parameter.h"

#include <shardwise/parallelize.h>

#include <vector>

namespace shardwise::tensor_parallel {

/// What is to happen to a parameter.
struct Chosen {
  engine::NamedTensor parameter;
  /// The dimension that is divided; -1 for a parameter that stays whole.
  int64_t dim;
  layout::AxisPieces pieces;
  std::optional<Split> matrix;
  std::optional<Split> table;
  /// Whether its gradient is added up over the ranks.
  bool sums_gradient = false;
};

/// What a plan says of the parameters below a module, for an axis of this many ranks.
/// Raises ValueError for a pattern that fits nothing, and for a module or parameter that cannot be divided as it says.
std::vector<Chosen> choose(const torch::nn::Module& module, const SplitPlan& plan, int64_t ranks);

} // namespace shardwise::tensor_parallel
