#pragma once

#include <shardwise/detail/export.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace shardwise::comm {

/// The processes of some ranks on this host. It notices when one of them ends.
class SHARDWISE_API Processes {
 public:
  /// A line that describes this process, which is rank `rank`, to the others.
  static std::string identity(int64_t rank);

  Processes() = default;
  /// The processes of these identities.
  explicit Processes(const std::vector<std::string>& identities);

  /// The positions, among the identities, of processes that have ended. Never blocks.
  std::vector<size_t> ended() const;
  /// For example: rank 2 died: its process 4711 on this host ended. Look for the error of rank 2
  std::string how_it_ended(size_t position) const;
  /// Call this when a connection was lost: how_it_ended() of a process that has ended or does so within half a second;
  /// "" if none does.
  std::string who_ended() const;

 private:
  class Process;
  std::vector<std::shared_ptr<Process>> all_;
};

} // namespace shardwise::comm
