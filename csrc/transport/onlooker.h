#pragma once

#include <shardwise/export.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace shardwise::transport {

/// A collective that the program itself called on one of our process groups.
struct OwnCall {
  /// The group's id, shared by its ranks, and the collective's number in the group.
  uint64_t group = 0;
  uint64_t number = 0;
  /// For example: all_reduce of 3 elements
  std::string what;
};

/// Called from time to time while a thread waits long for one of the program's own collectives. It may raise an Error.
class SHARDWISE_API Onlooker {
 public:
  virtual ~Onlooker() = default;
  virtual void look_at(const OwnCall& call) = 0;

  /// Registers an onlooker for the calling thread.
  static void of_this_thread(std::weak_ptr<Onlooker> onlooker);
  /// Waits until ends_within(time) returns true, calling this thread's onlookers meanwhile.
  static void wait(
      const std::function<OwnCall()>& call, const std::function<bool(std::chrono::milliseconds)>& ends_within);
};

} // namespace shardwise::transport
