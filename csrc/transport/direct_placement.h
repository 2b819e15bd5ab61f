#pragma once

#include <shardwise/export.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace shardwise::transport {

/// Ranges of an all-gather's result that go straight into other memory instead of into its output.
struct DirectPlacement {
  struct Range {
    /// Where it begins in the output, in bytes. A range lies within one rank's part.
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

} // namespace shardwise::transport
