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
