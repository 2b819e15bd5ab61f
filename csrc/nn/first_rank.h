#pragma once

#include "engine/front_end.h"

#include <string>
#include <vector>

namespace shardwise::nn {

/// Brings what the first rank of a mesh has to all its ranks, which call the same functions in the same order.
class FirstRank {
 public:
  /// Of the ranks of this unit. Without one, and for a rank that is alone, each has what it needs itself.
  explicit FirstRank(engine::Unit* unit) : unit_(unit != nullptr && unit->ranks().world() > 1 ? unit : nullptr) {}

  /// Whether this rank has what is to be brought.
  bool is_here() const {
    return unit_ == nullptr || unit_->mesh().rank() == 0;
  }
  /// `what`: for errors.
  void share(std::vector<std::string>& texts, const std::string& what) const;
  /// A tensor of these sizes and of the dtype of `options`, on the mesh's device; what it has elsewhere on this rank is
  /// not looked at. `counters`: those to which it counts.
  at::Tensor share(
      const at::Tensor& value, at::IntArrayRef sizes, const at::TensorOptions& options, const std::string& what,
      Counters* counters = nullptr) const;

 private:
  engine::Unit* unit_;
};

} // namespace shardwise::nn
