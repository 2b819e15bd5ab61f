#pragma once

#include "pipeline/table.h"

#include <deque>
#include <initializer_list>
#include <map>
#include <vector>

namespace shardwise::pipeline {

/// What a rank does next, in words that leave the microbatch open: the stage's next one.
/// A half on the weights needs no stage: it belongs to the half on the input that has waited for it longest.
struct Task {
  Kind kind;
  int stage = 0;
};

/// Writes the list of a rank whose stages take the microbatches in order, both forward and backward.
class RankWriter {
 public:
  explicit RankWriter(int microbatches) : microbatches_(microbatches) {}

  /// Writes nothing if there are no microbatches left for it.
  void add(const Task& task);
  void repeat(int times, std::initializer_list<Task> tasks);
  /// The list, with the halves on the weights that still wait at its end.
  std::vector<Action> finish() &&;

 private:
  int microbatches_;
  std::map<int, int> forwards_;
  std::map<int, int> backwards_;
  std::deque<Action> waiting_;
  std::vector<Action> actions_;
};

} // namespace shardwise::pipeline
