#include "pipeline/table.h"

#include <array>

namespace shardwise::pipeline {

bool is_send(Kind kind) {
  return kind == Kind::send_forward || kind == Kind::send_backward;
}

bool is_receive(Kind kind) {
  return kind == Kind::receive_forward || kind == Kind::receive_backward;
}

int other_end(const Action& transfer) {
  const bool is_next = transfer.kind == Kind::send_forward || transfer.kind == Kind::receive_backward;
  return transfer.stage + (is_next ? 1 : -1);
}

std::optional<Action> send_after(const Table& table, const Action& action) {
  const bool is_forward = action.kind == Kind::forward;
  if (!is_forward && action.kind != Kind::backward && action.kind != Kind::backward_input) return std::nullopt;
  const Action send{is_forward ? Kind::send_forward : Kind::send_backward, action.stage, action.microbatch};
  const auto to = other_end(send);
  const bool is_elsewhere =
      to >= 0 && to < table.stages() && table.rank_of_stage[to] != table.rank_of_stage[action.stage];
  return is_elsewhere ? std::optional(send) : std::nullopt;
}

Action receive_of(const Action& send) {
  const auto kind = send.kind == Kind::send_forward ? Kind::receive_forward : Kind::receive_backward;
  return {kind, other_end(send), send.microbatch};
}

std::string text(const Action& action) {
  static constexpr std::array<const char*, 8> kLetters{"F", "B", "I", "W", "SF", "RF", "SB", "RB"};
  return std::to_string(action.stage) + kLetters.at(static_cast<size_t>(action.kind)) +
         std::to_string(action.microbatch);
}

std::string text(const Table& table) {
  std::string all;
  for (int rank = 0; rank < table.ranks(); ++rank) {
    // Piece by piece, for g++ 12 warns of sums of literals and temporaries.
    all += "rank ";
    all += std::to_string(rank);
    all += ':';
    for (const auto& action : table.of_rank[rank]) {
      all += ' ';
      all += text(action);
    }
    all += '\n';
  }
  return all;
}

} // namespace shardwise::pipeline
