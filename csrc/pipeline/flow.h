#pragma once

#include "pipeline/table.h"

#include <cstddef>
#include <optional>
#include <vector>

namespace shardwise::pipeline {

bool is_send(Kind kind);
bool is_receive(Kind kind);

/// The stage at the other end of a transfer; -1 or the number of stages if there is none.
int other_end(const Action& transfer);

/// Whether a send or receive of this stage would go to another rank, or come from one.
bool crosses_ranks(const Table& table, const Action& transfer);

/// Whether any rank sends or receives in this table.
bool has_transfers(const Table& table);

/// The send that takes what an action computes to the rank that needs it. None if no other rank does.
std::optional<Action> send_after(const Table& table, const Action& action);

/// The receive that belongs to a send.
Action receive_of(const Action& send);

/// What must be there before an action of this table begins. A half on the input stands for a whole backward too.
/// With transfers, an action that computes needs a receive where its input comes from another rank.
std::vector<Action> needs(const Table& table, const Action& action, bool has_transfers);

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

/// The action of_rank[rank][index].
struct TableEntry {
  int rank;
  size_t index;
};

/// An order in which the ranks can carry out all of a table, each strictly in its own order and each action after what
/// it needs. A send waits until the other rank comes to the receive, which then follows the send. Where the ranks get
/// stuck, the rest is missing.
/// The stages and microbatches of the actions must be ones that the table has.
std::vector<TableEntry> order_of(const Table& table);

} // namespace shardwise::pipeline
