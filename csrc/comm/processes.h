#pragma once

#include <shardwise/export.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace shardwise::comm {

/// The processes that some ranks are, as far as this one can see them end: those on its host.
class SHARDWISE_API Processes {
 public:
  /// What others need to know of this process, which is that rank: a line.
  static std::string card(int64_t rank);

  Processes() = default;
  /// Those of these cards.
  explicit Processes(const std::vector<std::string>& cards);

  /// The positions, among the cards, of those that have ended. No call of it waits.
  std::vector<size_t> ended() const;
  /// For example: rank 2 died: its process 4711 on this host ended
  std::string how_it_ended(size_t position) const;
  /// The same of one that ended, or does within half a second, where a connection was lost: "" if none does.
  std::string who_ended() const;

 private:
  class Process;
  std::vector<std::shared_ptr<Process>> all_;
};

} // namespace shardwise::comm
