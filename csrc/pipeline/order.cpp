#include "pipeline/order.h"

#include "pipeline/flow.h"
#include "pipeline/per_action.h"

#include <algorithm>
#include <utility>

namespace shardwise::pipeline {
namespace {

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

std::vector<TableEntry> order_of(const Table& table) {
  return Progress(table).to_the_end();
}

} // namespace shardwise::pipeline
