#pragma once

#include <shardwise/export.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace shardwise::transport {

/// A collective that the program called itself, on a process group of our transport.
struct OwnCall {
  /// What all ranks of the process group know it by, and the collective's number there.
  uint64_t group = 0;
  uint64_t number = 0;
  /// For example: all_reduce of 3 elements
  std::string what;
};

/// Who is asked now and then while a thread waits long for a collective of the program's own. It may raise an Error.
class SHARDWISE_API Onlooker {
 public:
  virtual ~Onlooker() = default;
  virtual void look_at(const OwnCall& call) = 0;

  /// From now on this one is asked for the calling thread.
  static void of_this_thread(std::weak_ptr<Onlooker> onlooker);
  /// Waits until ends_within(time) says so, and asks those of this thread meanwhile.
  static void wait(
      const std::function<OwnCall()>& call, const std::function<bool(std::chrono::milliseconds)>& ends_within);
};

} // namespace shardwise::transport
