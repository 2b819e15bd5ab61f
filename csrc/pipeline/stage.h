#pragma once

#include <shardwise/pipeline.h>
#include <shardwise/unit.h>

#include <memory>
#include <vector>

namespace shardwise::pipeline {

/// A stage of this rank, and the units that its module has.
class Stage {
 public:
  /// Raises ValueError for a stage without a function.
  Stage(int number, PipelineStage given, bool gather_once);

  int number() const {
    return number_;
  }
  std::vector<at::Tensor> forward(const std::vector<at::Tensor>& inputs) const {
    return given_.forward(inputs);
  }
  /// Tells the units whether the next backward is the last one of the step, in which gradients are summed.
  void before_backward(bool is_last);
  void after_backward(bool is_last);
  /// Whether its units free full parameters between the halves of a backward.
  bool gathers_for_each_half() const {
    return !gather_once_ && !units_.empty();
  }
  /// Forgets what is under way after an error.
  void reset();
  const std::vector<std::shared_ptr<engine::Unit>>& outermost() const {
    return outermost_;
  }

 private:
  int number_;
  PipelineStage given_;
  bool gather_once_;
  std::vector<std::shared_ptr<engine::Unit>> outermost_;
  std::vector<Unit> units_;
};

/// Raises ValueError if two stages are in one unit, which could not tell their last backwards apart.
void expect_units_apart(const std::vector<Stage>& stages);

} // namespace shardwise::pipeline
