#pragma once

#include <shardwise/detail/export.h>

#include <cstdint>
#include <string>
#include <vector>

namespace shardwise::pipeline {

/// What an action does with one microbatch in one stage.
enum class Kind : uint8_t {
  forward,
  /// The whole backward: both of the halves below.
  backward,
  /// The gradient of the stage's input, which the stage before waits for.
  backward_input,
  /// The gradients of the stage's weights, which nobody waits for.
  backward_weight,
  /// The stage's output goes to the next stage.
  send_forward,
  /// The stage's input comes from the stage before.
  receive_forward,
  /// The gradient of the stage's input goes to the stage before.
  send_backward,
  /// The gradient of the stage's output comes from the next stage.
  receive_backward,
};

/// One thing that a rank does. The stage is always one of that rank: the sending one of a send, the receiving one of a
/// receive.
struct Action {
  Kind kind;
  int stage;
  int microbatch;
  bool operator==(const Action&) const = default;
};

/// A schedule: what each rank does in one step, in order. A rank waits where it must; such gaps are not stored.
/// Stages and microbatches count from 0. Those of schedules.h say only what is computed; with_transfers() adds sends
/// and receives.
struct Table {
  int microbatches = 0;
  std::vector<int> rank_of_stage;
  std::vector<std::vector<Action>> of_rank;

  int ranks() const {
    return static_cast<int>(of_rank.size());
  }
  int stages() const {
    return static_cast<int>(rank_of_stage.size());
  }
  bool operator==(const Table&) const = default;
};

bool is_send(Kind kind);
bool is_receive(Kind kind);

/// The stage at the other end of a transfer; -1 or the number of stages if there is none.
int other_end(const Action& transfer);

/// Stage, kind and microbatch: "2F3", with B for the whole backward, I and W for its halves on input and weights, and
/// SF, RF, SB and RB for the sends and receives of activations (F) and gradients (B).
SHARDWISE_API std::string text(const Action& action);

/// A line for each rank.
SHARDWISE_API std::string text(const Table& table);

} // namespace shardwise::pipeline
