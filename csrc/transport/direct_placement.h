#pragma once

#include <shardwise/export.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace shardwise::transport {

/// Ranges of what an all-gather brings that go at once to memory of their own, instead of into its output.
struct DirectPlacement {
  struct Range {
    /// In the output, in bytes; within what one rank sends.
    size_t offset;
    size_t bytes;
    /// In the memory, in bytes.
    size_t place;
  };
  /// A range of fewer bytes costs more as a message of its own than its copy out of the output does.
  static constexpr size_t kLeast = 65536;

  const at::Tensor& memory;
  /// In the order of their offsets. All ranks have ranges of the same offsets and bytes.
  const std::vector<Range>& ranges;
};

/// Hands a placement over to the direct back end, past c10d, whose calls have no place for it: to the all-gather that
/// this thread issues within its life.
class SHARDWISE_API DirectPlacementScope {
 public:
  explicit DirectPlacementScope(const DirectPlacement* placement);
  ~DirectPlacementScope();
  DirectPlacementScope(const DirectPlacementScope&) = delete;
  DirectPlacementScope& operator=(const DirectPlacementScope&) = delete;

  /// Of the innermost scope of this thread, for the back end; null where there is none.
  static const DirectPlacement* current();

 private:
  const DirectPlacement* outer_;
};

} // namespace shardwise::transport
