#include "pipeline/rank_writer.h"

#include <utility>

namespace shardwise::pipeline {

void RankWriter::add(const Task& task) {
  if (task.kind == Kind::backward_weight) {
    if (waiting_.empty()) return;
    actions_.push_back(waiting_.front());
    waiting_.pop_front();
    return;
  }
  const auto microbatch = (task.kind == Kind::forward ? forwards_ : backwards_)[task.stage]++;
  if (microbatch >= microbatches_) return;
  actions_.push_back({task.kind, task.stage, microbatch});
  if (task.kind == Kind::backward_input) waiting_.push_back({Kind::backward_weight, task.stage, microbatch});
}

void RankWriter::repeat(int times, std::initializer_list<Task> tasks) {
  for (int i = 0; i < times; ++i) {
    for (const auto& task : tasks) add(task);
  }
}

std::vector<Action> RankWriter::finish() && {
  actions_.insert(actions_.end(), waiting_.begin(), waiting_.end());
  return std::move(actions_);
}

} // namespace shardwise::pipeline
