// The transport's interface for the other layers.
#pragma once

#include "transport/shared_memory.h"

#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace shardwise::transport {

/// Counts the collectives that this rank has issued on one process group. Found by the group's id, which all ranks
/// share.
class SHARDWISE_API IssueCount {
 public:
  explicit IssueCount(uint64_t group);
  ~IssueCount();

  uint64_t group() const {
    return group_;
  }
  /// Counts one more, and returns its number, from 1.
  uint64_t next();
  uint64_t count() const {
    return count_;
  }

  /// The calling rank's count. Nothing if this rank is not in the group, or if ranks are threads and it is not clear
  /// which one this is.
  static std::optional<uint64_t> of(uint64_t group);

 private:
  const uint64_t group_;
  std::atomic<uint64_t> count_ = 0;
  std::atomic<std::thread::id> thread_;
};

/// A collective that the program itself called on one of our process groups.
struct ProgramCall {
  /// The group's id, shared by its ranks, and the collective's number in the group.
  uint64_t group = 0;
  uint64_t number = 0;
  /// For example: all_reduce of 3 elements
  std::string what;
};

/// Called from time to time while a thread waits long for one of the program's own collectives. It may raise an Error.
class SHARDWISE_API WaitObserver {
 public:
  virtual ~WaitObserver() = default;
  virtual void still_waiting(const ProgramCall& call) = 0;

  /// Registers an observer for the calling thread.
  static void add_for_this_thread(std::weak_ptr<WaitObserver> observer);
  /// Waits until ends_within(time) returns true, calling this thread's observers meanwhile.
  static void wait(
      const std::function<ProgramCall()>& call, const std::function<bool(std::chrono::milliseconds)>& ends_within);
};

/// Ranges of an all-gather's result that go straight into other memory. What is left fills the output, without gaps.
struct DirectPlacement {
  struct Range {
    /// Where it begins in the result, in bytes. A range lies within one rank's part.
    size_t offset;
    size_t bytes;
    /// Where it goes in `memory`, in bytes.
    size_t to;
  };
  /// The smallest range worth placing directly: below this, a message of its own costs more than a copy out of the
  /// output.
  static constexpr size_t kLeast = 65536;

  const at::Tensor& memory;
  /// Sorted by offset. All ranks have ranges with the same offsets and sizes.
  const std::vector<Range>& ranges;
};

/// Passes a placement to our back end around c10d, whose calls have no argument for it. It applies to the all-gather
/// that this thread issues while the scope lives.
class SHARDWISE_API DirectPlacementScope {
 public:
  explicit DirectPlacementScope(const DirectPlacement* placement);
  ~DirectPlacementScope();
  DirectPlacementScope(const DirectPlacementScope&) = delete;
  DirectPlacementScope& operator=(const DirectPlacementScope&) = delete;

  /// The placement of this thread's innermost scope, for the back end; null if there is none.
  static const DirectPlacement* current();

 private:
  const DirectPlacement* outer_;
};

struct BackendOptions {
  /// Whether to use shared memory if all ranks are on one host and can read each other's.
  bool shared_memory = true;
  /// The name of this host; ranks with the same name are on one host.
  std::string host;
  std::chrono::milliseconds connect_timeout;
  std::chrono::milliseconds timeout;
  /// The rank numbers that errors show; if empty, positions in the group.
  std::vector<int64_t> names = {};
};

/// Makes a back end (transport/backend.h). All ranks of `gloo` call this; nobody else may use `gloo`
/// from now on.
c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> gloo, BackendOptions options);

/// How one of our back ends carries out collectives: "shared memory" or "TCP". Empty for other back ends.
std::string transport_name(const c10d::Backend& backend);

} // namespace shardwise::transport
