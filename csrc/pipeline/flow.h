#pragma once

#include "pipeline/table.h"

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

} // namespace shardwise::pipeline
