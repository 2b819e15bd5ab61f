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
