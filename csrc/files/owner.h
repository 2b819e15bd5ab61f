#pragma once

#include <shardwise/detail/export.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace shardwise::files {

/// The process that makes a checkpoint, and which of its checkpoints that is. Part of the names of folders that are not
/// in their place yet, so that a later save can tell whether its process still runs.
struct SHARDWISE_API Owner {
  /// Identifies a host and its namespace of processes.
  uint64_t host = 0;
  int64_t process = 0;
  /// When the process began, as the system counts; another process may get its number later.
  uint64_t began = 0;
  int64_t count = 0;

  /// This process, with a count that it has not used.
  static Owner next();
  /// As part of a name: host, process, began and count, with dashes.
  std::string text() const;
  /// Nothing if this is no such text.
  static std::optional<Owner> parse(std::string_view text);

  /// Whether the process has surely ended. A process on another host never counts as ended.
  bool has_ended() const;
  bool operator==(const Owner&) const = default;
};

} // namespace shardwise::files
