#include "pipeline/table.h"

#include <array>

namespace shardwise::pipeline {

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
