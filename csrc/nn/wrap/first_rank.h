#pragma once

#include "nn/state/module_state.h"

#include <shardwise/state_dict.h>

#include <string>
#include <vector>

namespace shardwise::nn {

/// Brings what the first rank of a mesh has to all its ranks, which call the same functions in the same order.
class FirstRank {
 public:
  /// The first of all ranks that hold parts of this module. A rank that is alone has all it needs; every rank does if
  /// the options say that each has the dict. Raises ValueError, which names the `dict`, if meshes have no common rank
  /// 0.
  FirstRank(
      const torch::nn::Module& module, const ModuleState& state, const LoadStateDictOptions& options,
      const std::string& dict);

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
  /// The same for a whole tensor of an entry.
  at::Tensor share(const at::Tensor& value, const ModuleState::Entry& entry, const std::string& what) const {
    auto* counters = entry.unit ? &entry.unit->own_counters() : nullptr;
    return share(value, entry.sizes, entry.tensor.options(), what, counters);
  }

 private:
  /// First along the axes of parallelize(), then over the ranks of the unit.
  std::vector<std::shared_ptr<const split::SplitAxis>> axes_;
  engine::Unit* unit_ = nullptr;
  bool is_here_ = true;
};

} // namespace shardwise::nn
