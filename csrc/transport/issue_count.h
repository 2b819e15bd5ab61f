#pragma once

#include <shardwise/export.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <thread>

namespace shardwise::transport {

/// How many collectives this rank has issued on a process group, found by what all ranks of the group know it by.
class SHARDWISE_API IssueCount {
 public:
  explicit IssueCount(uint64_t group);
  ~IssueCount();
  IssueCount(const IssueCount&) = delete;
  IssueCount& operator=(const IssueCount&) = delete;

  uint64_t group() const {
    return group_;
  }
  /// One more; its number, counted from 1.
  uint64_t next();

  /// That of the rank that the calling thread is. Nothing where it is not in that group, or where ranks are threads and
  /// nobody can tell which this one is.
  static std::optional<uint64_t> of(uint64_t group);

 private:
  const uint64_t group_;
  std::atomic<uint64_t> count_ = 0;
  std::atomic<std::thread::id> thread_;
};

} // namespace shardwise::transport
