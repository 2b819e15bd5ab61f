#pragma once

#include "programs/model.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::test {

/// One call of fully_shard() or replicate().
struct UnitSpec {
  /// As named_modules() of the model names them; "" is the model.
  std::vector<std::string> modules;
  bool is_sharded = true;
  bool is_flat = false;
  /// Cut along the last dimension.
  bool is_last_dim = false;
  std::optional<bool> reshard_after_forward = std::nullopt;
  /// Ranks that hold everything together after forward; 0: none do.
  int holders = 0;
  /// What gradients are divided by, if not by the number of ranks, and whether after the sum.
  std::optional<double> divisor = std::nullopt;
  bool divides_after = false;
  /// The parameters that it has itself, and its place in the tree of units: -1 at the top.
  std::vector<std::string> parameters = {};
  int outer = -1;

  std::string text() const;
};

struct Instruction {
  enum class Kind {
    forward,
    no_grad,
    inference,
    backward,
    backward_some,
    gradient_of_input,
    forget_graphs,
    throw_in_forward,
    throw_in_backward,
    sync,
    all_reduce,
    look_ahead,
    reshard_after_forward,
    reshard_after_backward,
    unshard_in_backward,
    prefetch,
    unshard,
    reshard,
    reset,
    write,
    freeze,
    step,
    zero_grad,
  };
  Kind kind = Kind::forward;
  /// What a forward chooses and what data it gets.
  uint64_t seed = 0;
  /// A unit, a node, a way to write: whatever the kind needs.
  int which = 0;
  /// What is set; that a graph is kept, an unshard async, all reset afterwards, a gradient none.
  bool flag = false;
  /// Also below; all graphs, waited for, the model and not the optimizer.
  bool flag2 = false;
  /// Units to prefetch.
  std::vector<int> units = {};
  /// Parameters.
  std::vector<std::string> names = {};

  std::string text() const;
};

/// A model, its units, and what is done with them: everything follows from the seed.
struct Program {
  static constexpr int kRanks = 4;

  /// `plain`: on a mesh of one axis, with no policy but those of resharding.
  explicit Program(uint64_t seed, bool plain = false);
  std::string text() const;
  /// The unit that has the parameter; -1 when none has.
  int unit_of(const std::string& parameter) const;
  /// The top of the tree that the unit is in.
  int top_of(int unit) const;
  /// Whether the first lies in the tree below the second, or is it.
  bool is_in(int unit, int top) const;

  uint64_t seed;
  ModelSpec model;
  std::vector<UnitSpec> units;
  /// The model itself is a unit. Else its own parameters are constants.
  bool has_root = true;
  /// Gathers and sums share a process group.
  bool one_group = false;
  bool adam = false;
  /// Copies of shards: the size of the first axis of the mesh of sharded units.
  int copies = 1;
  std::vector<Instruction> instructions;

 private:
  void group_modules(Random& random);
  void write_instructions(Random& random);
  void find_owners();
  void add_policies(Random& random);
  Instruction instruction(Random& random, int& graphs);
  uint64_t forward_seed(Random& random) const;

  /// Parameters that must stay trained: each tree, and what ranks may leave out, has one that every rank uses.
  std::vector<std::string> may_freeze_;
  std::vector<std::string> top_scales_;
};

/// The nodes that run in a forward, the same on all ranks.
std::vector<int> nodes_that_run(const NodeSpec& root, uint64_t seed);

} // namespace shardwise::test
