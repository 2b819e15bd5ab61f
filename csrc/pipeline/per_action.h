#pragma once

#include "pipeline/table.h"

#include <cstddef>
#include <vector>

namespace shardwise::pipeline {

/// A value for each action that a table can have. A whole backward has no value of its own: it is its two halves.
template <class T>
class PerAction {
 public:
  PerAction(const Table& table, T value)
      : stages_(table.stages()),
        values_(kKinds * table.stages() * table.microbatches, value) {}

  /// That of the half on the input, for a whole backward.
  T operator[](const Action& action) const {
    return values_[place(action)];
  }
  void set(const Action& action, T value) {
    values_[place(action)] = value;
    if (action.kind == Kind::backward) set({Kind::backward_weight, action.stage, action.microbatch}, value);
  }

 private:
  static constexpr size_t kKinds = static_cast<size_t>(Kind::receive_backward) + 1;

  size_t place(const Action& action) const {
    const auto kind = action.kind == Kind::backward ? Kind::backward_input : action.kind;
    return (static_cast<size_t>(action.microbatch) * stages_ + action.stage) * kKinds + static_cast<size_t>(kind);
  }

  size_t stages_;
  std::vector<T> values_;
};

} // namespace shardwise::pipeline
