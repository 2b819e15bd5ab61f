#pragma once

#include "programs/program.h"
#include "support/rank.h"

#include <shardwise/shardwise.h>

#include <map>

namespace shardwise::test {

/// Runs a program on one rank, and beside it a plain model that sees the data of all ranks. After each instruction
/// this rank's shards and gradients must be the pieces of the plain ones; raises std::runtime_error where they are not.
class Machine {
 public:
  Machine(Rank& rank, const Program& program);
  void run();

 private:
  /// A forward whose backward is still to come.
  struct Graph {
    torch::Tensor loss;
    torch::Tensor input;
    /// Of each rank, in the plain model.
    std::vector<torch::Tensor> plain_losses;
    std::vector<torch::Tensor> plain_inputs;
    std::set<int> units;
  };
  /// What the plain model lacks.
  struct UnitState {
    bool sync = true;
    bool all_reduce = true;
    bool frees_after_backward = true;
    /// It was used with gradients to come since the last backward of its tree.
    bool engaged = false;
  };

  void wrap();
  void execute(const Instruction& instruction);
  torch::Tensor input(uint64_t seed, int rank) const;
  Graph run_forward(uint64_t seed, std::optional<int> throws_backward = std::nullopt);
  void engage(const std::set<int>& nodes, std::set<int>* units = nullptr);
  void evaluate(uint64_t seed);
  void backward(const std::vector<Graph>& graphs, bool keeps, const std::vector<std::string>* names = nullptr);
  void average(const std::map<std::string, torch::Tensor>& gradients);
  void gradient_of_input(const Graph& graph, const std::vector<std::string>& names);
  void throw_in_forward(const Instruction& instruction);
  void throw_in_backward(const Instruction& instruction);
  void reset(int unit);
  void reset_trees();
  void write(const Instruction& instruction);

  torch::Tensor piece_of(const std::string& name, const torch::Tensor& whole) const;
  void check() const;
  void check_freed(int top, bool all) const;
  template <typename Do>
  void for_units(int unit, bool below, const Do& act);

  Rank& rank_;
  const Program& program_;
  std::shared_ptr<NodeImpl> ours_, plain_;
  torch::OrderedDict<std::string, torch::Tensor> plain_parameters_;
  /// The full leaves.
  std::map<std::string, torch::Tensor> members_;
  std::map<int, int> unit_of_node_;
  std::vector<Unit> units_;
  std::vector<UnitState> states_;
  /// Sums that wait for a backward with synchronisation.
  std::map<std::string, torch::Tensor> waiting_;
  std::vector<Graph> graphs_;
  std::unique_ptr<torch::optim::Optimizer> mine_, theirs_;
};

} // namespace shardwise::test
