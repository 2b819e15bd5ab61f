#pragma once

#include "nn/state/module_state.h"

#include <string>
#include <vector>

namespace shardwise::nn {

/// Brings what the first rank of a mesh has to all its ranks, which call the same functions in the same order.
class FirstRank {
 public:
  /// The first of all ranks that hold parts of this module. A rank that is alone has all it needs; with `each_has_all`
  /// every rank does.
  FirstRank(const ModuleState& module, bool each_has_all);

  /// Whether this rank has what is to be brought.
  bool is_here() const {
    return is_here_;
  }
  /// `what`: for errors.
  void share(std::vector<std::string>& texts, const std::string& what) const;
  /// A tensor of these sizes and of the dtype of `options`, on the mesh's device, with the first rank's values.
  /// `counters` count the collectives.
  at::Tensor share(
      const at::Tensor& value, at::IntArrayRef sizes, const at::TensorOptions& options, const std::string& what,
      Counters* counters = nullptr) const;

 private:
  /// First along the axes of parallelize(), then over the ranks of the unit.
  std::vector<std::shared_ptr<const split::SplitAxis>> axes_;
  engine::Unit* unit_ = nullptr;
  bool is_here_ = true;
};

} // namespace shardwise::nn
