#include "pipeline/check.h"

#include "pipeline/flow.h"

#include <shardwise/error.h>

#include <optional>
#include <vector>

namespace shardwise::pipeline {
namespace {

using std::to_string;

std::string problem_of_shape(const Table& table) {
  if (table.ranks() < 1) return "the table has no ranks";
  if (table.stages() < 1) return "the table has no stages";
  if (table.microbatches < 1) return "the table has " + to_string(table.microbatches) + " microbatches";
  for (int stage = 0; stage < table.stages(); ++stage) {
    const auto rank = table.rank_of_stage[stage];
    if (rank < 0 || rank >= table.ranks())
      return "stage " + to_string(stage) + " is on rank " + to_string(rank) + " of " + to_string(table.ranks());
  }
  return "";
}

/// Why an action is not one of this rank; "" if it is.
std::string fault_of_place(const Table& table, int rank, const Action& action) {
  if (action.stage < 0 || action.stage >= table.stages())
    return ", but there are " + to_string(table.stages()) + " stages";
  if (action.microbatch < 0 || action.microbatch >= table.microbatches)
    return ", but there are " + to_string(table.microbatches) + " microbatches";
  if (table.rank_of_stage[action.stage] != rank)
    return ", but that stage is on rank " + to_string(table.rank_of_stage[action.stage]);
  if ((is_send(action.kind) || is_receive(action.kind)) && !crosses_ranks(table, action))
    return ", but there is no other rank at that end of the stage";
  return "";
}

/// A half on the input stands for a whole backward too, unless the half itself is meant.
std::string name_of(const Action& action, bool is_half_meant = false) {
  if (action.kind != Kind::backward_input || is_half_meant) return text(action);
  return text(Action{Kind::backward, action.stage, action.microbatch}) + " or " + text(action);
}

/// Why an action does not fit what its rank has done before; "" if it does.
std::string fault_of_history(
    const Table& table, const Action& action, bool has_transfers, const PerAction<bool>& done) {
  if (done[action]) return " although it has done so already";
  for (const auto& need : needs(table, action, has_transfers)) {
    if (table.rank_of_stage[need.stage] != table.rank_of_stage[action.stage] || done[need]) continue;
    return " without " + name_of(need, action.kind == Kind::backward_weight) + " before it";
  }
  return "";
}

/// What is wrong within one rank's list, whatever the others do. Marks what it does.
std::string problem_of_list(const Table& table, int rank, bool has_transfers, PerAction<bool>& done) {
  for (const auto& action : table.of_rank[rank]) {
    auto fault = fault_of_place(table, rank, action);
    if (fault.empty()) fault = fault_of_history(table, action, has_transfers, done);
    if (!fault.empty()) return "rank " + to_string(rank) + " does " + text(action) + fault;
    done.set(action, true);
  }
  return "";
}

std::string problem_of_missing(const Table& table, bool has_transfers, const PerAction<bool>& done) {
  std::string problem;
  const auto expect = [&](const Action& action) {
    if (done[action] || !problem.empty()) return;
    problem = "rank " + to_string(table.rank_of_stage[action.stage]) + " never does " + name_of(action);
  };
  for (int stage = 0; stage < table.stages(); ++stage) {
    for (int microbatch = 0; microbatch < table.microbatches; ++microbatch) {
      for (const auto kind : {Kind::forward, Kind::backward_input, Kind::backward_weight}) {
        const Action action{kind, stage, microbatch};
        expect(action);
        // A receive that is missing is missed where its data is used.
        const auto send = has_transfers ? send_after(table, action) : std::nullopt;
        if (send) expect(*send);
      }
    }
  }
  return problem;
}

/// Where the ranks stand when none can go on.
std::string problem_of_progress(const Table& table) {
  std::vector<size_t> done(table.of_rank.size(), 0);
  for (const auto& entry : order_of(table)) ++done[entry.rank];
  std::string waiting;
  for (int rank = 0; rank < table.ranks(); ++rank) {
    if (done[rank] == table.of_rank[rank].size()) continue;
    waiting += waiting.empty() ? "" : ", ";
    waiting += "rank " + to_string(rank) + " at " + text(table.of_rank[rank][done[rank]]);
  }
  return waiting.empty() ? "" : "no rank can go on: " + waiting;
}

} // namespace

std::string problem_of(const Table& table) {
  if (auto problem = problem_of_shape(table); !problem.empty()) return problem;
  PerAction<bool> done(table, false);
  const bool is_lowered = has_transfers(table);
  for (int rank = 0; rank < table.ranks(); ++rank) {
    if (auto problem = problem_of_list(table, rank, is_lowered, done); !problem.empty()) return problem;
  }
  if (auto problem = problem_of_missing(table, is_lowered, done); !problem.empty()) return problem;
  return problem_of_progress(table);
}

void check_schedule(const Table& table) {
  const auto problem = problem_of(table);
  if (problem.empty()) return;
  throw ValueError(
      "shardwise: a pipeline table cannot be carried out: " + problem +
      ". Every stage takes every microbatch forward and backward once, after what it needs, and no rank may wait for "
      "ever. Correct the table until problem_of() finds nothing.");
}

} // namespace shardwise::pipeline
