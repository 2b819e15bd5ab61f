#pragma once

#include <shardwise/export.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <thread>

namespace shardwise::transport {

/// Counts the collectives that this rank has issued on one process group. Found by the group's id, which all ranks
/// share.
class SHARDWISE_API IssueCount {
 public:
  explicit IssueCount(uint64_t group);
  ~IssueCount();
  IssueCount(const IssueCount&) = delete;
  IssueCount& operator=(const IssueCount&) = delete;

  uint64_t group() const {
    return group_;
  }
  /// Counts one more, and returns its number, from 1.
  uint64_t next();

  /// The calling rank's count. Nothing if this rank is not in the group, or if ranks are threads and it is not clear
  /// which one this is.
  static std::optional<uint64_t> of(uint64_t group);

 private:
  const uint64_t group_;
  std::atomic<uint64_t> count_ = 0;
  std::atomic<std::thread::id> thread_;
};

} // namespace shardwise::transport
