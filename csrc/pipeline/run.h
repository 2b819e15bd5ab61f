#pragma once

#include "pipeline/backward_halves.h"
#include "pipeline/stage.h"
#include "pipeline/table.h"
#include "pipeline/transfers.h"

#include <shardwise/pipeline.h>

#include <chrono>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shardwise::pipeline {

/// A rank's place in a pipeline.
struct OwnPart {
  Table table;
  int rank;
  /// This rank's number in the mesh, for errors.
  int64_t name;

  const std::vector<Action>& actions() const {
    return table.of_rank[static_cast<size_t>(rank)];
  }
  int rank_of(int stage) const {
    return table.rank_of_stage[static_cast<size_t>(stage)];
  }
  bool has(int stage) const {
    return rank_of(stage) == rank;
  }
};

/// One pass of a batch through the pipeline, on one rank: carries out the actions of a table.
class Run {
 public:
  using Tensors = std::vector<at::Tensor>;

  Run(const OwnPart& place, std::vector<Stage>& stages, const PipelineOptions& options, Transfers transfers);

  /// Cuts the batch. Raises ValueError for inputs or targets that cannot be cut.
  void take(const Tensors& inputs, const Tensors& targets, bool is_training);
  /// Carries out all actions. After an error only what the other ranks wait for is sent, and its text is returned; ""
  /// if there was none. Raises PeerError if the other ranks cannot be reached.
  std::string carry_out(std::string error);
  /// The results of the last stage; empty on other ranks.
  PipelineResult result(bool with_outputs);

 private:
  /// What one stage stores of a microbatch between its forward and its backward.
  struct Cell {
    Transfers::Arriving arriving_inputs;
    Transfers::Arriving arriving_gradients;
    Tensors inputs;
    Tensors outputs;
    Tensors gradients_of_outputs;
    Tensors gradients_of_inputs;
    /// The rows of this part of the batch.
    int64_t rows = 0;
    at::Tensor loss;
    /// Of a backward whose first half is done.
    std::optional<BackwardHalves> halves;
  };
  using Key = std::pair<int, int>;

  void act(const Action& action);
  /// Forward or backward.
  void compute(const Action& action);
  void forward(const Action& action);
  void backward(const Action& action);
  /// What a backward begins with.
  BackwardHalves begin_backward(const Action& action, Cell& cell);
  void send(const Action& action);
  void receive(const Action& action);
  /// Goes on after an error.
  void give_up(const Action& action);
  Stage& stage(int number);
  bool is_last(int stage) const {
    return stage + 1 == place_.table.stages();
  }
  bool is_last_backward(const Action& action) const;
  /// The message of a transfer.
  Message message(const Action& transfer) const;

  const OwnPart& place_;
  std::vector<Stage>& stages_;
  const PipelineOptions& options_;
  Transfers transfers_;
  bool is_training_ = false;
  /// By microbatch.
  std::vector<Tensors> inputs_;
  std::vector<Tensors> targets_;
  std::vector<double> weights_;
  std::map<Key, Cell> cells_;
  std::vector<at::Tensor> losses_;
  std::vector<Tensors> outputs_;
  std::chrono::steady_clock::duration busy_{};
};

} // namespace shardwise::pipeline
