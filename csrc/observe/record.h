#pragma once

#include <shardwise/detail/export.h>
#include <shardwise/record.h>

#include <atomic>
#include <cstdint>
#include <string>

namespace shardwise::observe {

extern SHARDWISE_API std::atomic<bool> is_recording;

/// Costs one relaxed load.
inline bool recording() {
  return is_recording.load(std::memory_order_relaxed);
}

/// Makes a file for this rank's record in `folder`, with no events in it, and the folder if it is missing. No other
/// process has this file, whether on another machine, in another container or from an earlier run. Returns its path.
/// Raises Error if it cannot be written.
SHARDWISE_API std::string make_record_file(const std::string& folder, int64_t rank);

/// Call this before a rank makes a unit, divides parameters or makes a pipeline: if SHARDWISE_RECORD asks for a record
/// of the whole program, makes its file now, and writes it when the program ends.
void open_program_record(int64_t rank);

/// Something that takes time. It ends with end(), or else with this object, and is then recorded.
class SHARDWISE_API Span {
 public:
  /// `kind` is "forward", "backward", "wait", "step" (of a pipeline), "stage" (what one of its stages does), or the
  /// kind of collective.
  Span(const char* kind, std::string name, int64_t rank, int64_t bytes = 0);
  ~Span();
  void end();

 private:
  const char* kind_;
  std::string name_;
  int64_t rank_;
  int64_t bytes_;
  int64_t begin_;
  std::atomic<bool> ended_ = false;
};

} // namespace shardwise::observe
