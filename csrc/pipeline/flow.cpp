#include "pipeline/flow.h"

#include <algorithm>
#include <utility>

namespace shardwise::pipeline {

int other_end(const Action& transfer) {
  const bool is_next = transfer.kind == Kind::send_forward || transfer.kind == Kind::receive_backward;
  return transfer.stage + (is_next ? 1 : -1);
}

namespace {

/// Adds what a stage waits for at the other end of this receive, if there is anything: the result itself, or the
/// receive where that is necessary.
void add_input(std::vector<Action>& needs, const Table& table, const Action& receive, Kind result, bool has_transfers) {
  const auto from = other_end(receive);
  if (from < 0 || from >= table.stages()) return;
  const bool is_received = has_transfers && crosses_ranks(table, receive);
  needs.push_back(is_received ? receive : Action{result, from, receive.microbatch});
}

class Progress {
 public:
  explicit Progress(const Table& table)
      : table_(table),
        has_transfers_(has_transfers(table)),
        done_(table, false),
        next_(table.of_rank.size(), 0) {}

  std::vector<TableEntry> to_the_end() && {
    size_t before = 0;
    do {
      before = order_.size();
      for (int rank = 0; rank < table_.ranks(); ++rank) {
        while (go_on(rank)) {
        }
      }
    } while (order_.size() > before);
    return std::move(order_);
  }

 private:
  const Action* next(int rank) const {
    const auto& actions = table_.of_rank[rank];
    return next_[rank] < actions.size() ? &actions[next_[rank]] : nullptr;
  }

  bool go_on(int rank) {
    const auto* action = next(rank);
    // The sender takes both steps of a transfer.
    if (!action || is_receive(action->kind) || !is_ready(*action)) return false;
    if (is_send(action->kind)) {
      const auto receive = receive_of(*action);
      const auto receiver = table_.rank_of_stage[receive.stage];
      const auto* theirs = next(receiver);
      if (!theirs || *theirs != receive) return false;
      take(rank);
      take(receiver);
    } else {
      take(rank);
    }
    return true;
  }

  bool is_ready(const Action& action) const {
    const auto needed = needs(table_, action, has_transfers_);
    return std::all_of(needed.begin(), needed.end(), [&](const Action& need) { return done_[need]; });
  }

  void take(int rank) {
    done_.set(*next(rank), true);
    order_.push_back({rank, next_[rank]++});
  }

  const Table& table_;
  bool has_transfers_;
  PerAction<bool> done_;
  std::vector<size_t> next_;
  std::vector<TableEntry> order_;
};

} // namespace

bool is_send(Kind kind) {
  return kind == Kind::send_forward || kind == Kind::send_backward;
}

bool is_receive(Kind kind) {
  return kind == Kind::receive_forward || kind == Kind::receive_backward;
}

bool crosses_ranks(const Table& table, const Action& transfer) {
  const auto other = other_end(transfer);
  if (other < 0 || other >= table.stages()) return false;
  return table.rank_of_stage[other] != table.rank_of_stage[transfer.stage];
}

bool has_transfers(const Table& table) {
  const auto is_transfer = [](const Action& action) { return is_send(action.kind) || is_receive(action.kind); };
  return std::any_of(table.of_rank.begin(), table.of_rank.end(), [&](const auto& actions) {
    return std::any_of(actions.begin(), actions.end(), is_transfer);
  });
}

std::optional<Action> send_after(const Table& table, const Action& action) {
  const bool is_forward = action.kind == Kind::forward;
  if (!is_forward && action.kind != Kind::backward && action.kind != Kind::backward_input) return std::nullopt;
  const Action send{is_forward ? Kind::send_forward : Kind::send_backward, action.stage, action.microbatch};
  return crosses_ranks(table, send) ? std::optional(send) : std::nullopt;
}

Action receive_of(const Action& send) {
  const auto kind = send.kind == Kind::send_forward ? Kind::receive_forward : Kind::receive_backward;
  return {kind, other_end(send), send.microbatch};
}

std::vector<Action> needs(const Table& table, const Action& action, bool has_transfers) {
  const auto [kind, stage, microbatch] = action;
  std::vector<Action> all;
  switch (kind) {
    case Kind::forward:
      add_input(all, table, {Kind::receive_forward, stage, microbatch}, Kind::forward, has_transfers);
      break;
    case Kind::backward:
    case Kind::backward_input:
      all.push_back({Kind::forward, stage, microbatch});
      add_input(all, table, {Kind::receive_backward, stage, microbatch}, Kind::backward_input, has_transfers);
      break;
    case Kind::backward_weight:
    case Kind::send_backward:
      all.push_back({Kind::backward_input, stage, microbatch});
      break;
    case Kind::send_forward:
      all.push_back({Kind::forward, stage, microbatch});
      break;
    case Kind::receive_forward:
      all.push_back({Kind::send_forward, other_end(action), microbatch});
      break;
    case Kind::receive_backward:
      all.push_back({Kind::send_backward, other_end(action), microbatch});
      break;
  }
  return all;
}

std::vector<TableEntry> order_of(const Table& table) {
  return Progress(table).to_the_end();
}

} // namespace shardwise::pipeline
