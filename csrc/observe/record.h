#pragma once

#include <shardwise/export.h>
#include <shardwise/record.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

namespace shardwise::observe {

extern SHARDWISE_API std::atomic<bool> is_recording;

/// Costs one relaxed load.
inline bool recording() {
  return is_recording.load(std::memory_order_relaxed);
}

/// Makes a file for the record of this rank in a folder, empty of events, and the folder where it is missing: one that
/// no other process has, be it on another machine, in another container or of an earlier run. Gives its path. Raises
/// Error where it cannot be written.
SHARDWISE_API std::string make_record_file(const std::string& folder, int64_t rank);

/// A rank of this process is about to make a unit: if SHARDWISE_RECORD asks for a record of the whole program, its file
/// is made now, and written when the program ends.
void open_program_record(int64_t rank);

/// Something that takes time. It ends when it is told so, or else when it goes; then it is written down.
class SHARDWISE_API Span {
 public:
  /// "forward", "backward", "wait", or what a collective is.
  Span(const char* kind, std::string name, int64_t rank, int64_t bytes = 0);
  ~Span();
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
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
