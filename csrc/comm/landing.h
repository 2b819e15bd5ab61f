#pragma once

#include <shardwise/export.h>

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace shardwise::comm {

/// Ranges of what an all-gather brings that go at once to memory of their own, instead of into its output.
struct Landing {
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

/// Hands a landing over to the direct back end, past c10d, whose calls have no place for it: to the all-gather that
/// this thread issues within its life.
class SHARDWISE_API LandingScope {
 public:
  explicit LandingScope(const Landing* landing);
  ~LandingScope();
  LandingScope(const LandingScope&) = delete;
  LandingScope& operator=(const LandingScope&) = delete;

  /// Of the innermost scope of this thread, for the back end; null where there is none.
  static const Landing* current();

 private:
  const Landing* outer_;
};

} // namespace shardwise::comm
