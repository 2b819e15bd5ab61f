#pragma once

#include "nn/recompute/autocast_state.h"
#include "nn/recompute/inner_graph.h"
#include "nn/recompute/random_state.h"

#include <shardwise/checkpoint.h>

#include <torch/csrc/autograd/saved_variable.h>

namespace shardwise::nn {

using detail::CheckpointFunction;
using detail::Tensors;

/// One run of a checkpoint's function, on aliases of the inputs at which its graph begins.
struct CheckpointRun {
  CheckpointRun(CheckpointFunction& fn, const Tensors& inputs);

  InnerGraph graph;
  Tensors aliases;
  Tensors outputs;
};

/// Stands for everything that the function put into the graph. Its edges lead to the inputs, and to where that part of
/// the graph ended; in backward it runs the function again to have that part back.
class CheckpointNode : public torch::autograd::Node {
 public:
  /// To be made before the first run: the second one starts from the autocast and random state of now.
  CheckpointNode(std::shared_ptr<CheckpointFunction> fn, const CheckpointOptions& options);

  /// Makes the first run, and keeps what the second one is compared with.
  CheckpointRun run(const Tensors& inputs);

  std::string name() const override {
    return "shardwise::Checkpoint";
  }
  Tensors apply(Tensors&& gradients) override;
  void release_variables() override;

 private:
  struct Output {
    bool defined;
    /// Whether its gradient arrives at this node.
    bool made;
    at::ScalarType dtype;
    at::Device device;
    std::vector<int64_t> sizes;

    bool operator==(const Output&) const = default;
    std::string text() const;
  };
  static std::vector<Output> outputs_of(const CheckpointRun& run);

  CheckpointRun run_again();
  Tensors gradients_of_inputs(Tensors gradients);
  void compare(const CheckpointRun& run) const;

  std::shared_ptr<CheckpointFunction> fn_;
  AutocastState autocast_;
  const bool keeps_random_state_;
  std::optional<RandomState> random_;
  std::vector<torch::autograd::SavedVariable> inputs_;
  /// Where the first run's part of the graph ended, apart from the inputs. next_edges() will not do: a checkpoint
  /// around this one changes those when it cuts off its own part.
  torch::autograd::edge_list ends_;
  std::vector<Output> outputs_;
};

} // namespace shardwise::nn
