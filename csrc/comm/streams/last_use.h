#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <optional>
#include <string>

namespace shardwise::comm {

/// The capture of a graph that what is issued on the device's current stream goes into; 0 if there is none.
uint64_t capture_of(c10::Device device);
inline bool is_captured(c10::Device device) {
  return capture_of(device) != 0;
}
/// Called before the host waits for what is issued on that stream: raises Error if it is captured. `what` says for what
/// the host waits, and `remedy` what to do.
void need_no_capture(c10::Device device, c10::function_ref<std::string()> what, const char* remedy);

/// Where on its device a piece of memory was used last: a stream, and a point on it. On a CPU it does nothing.
class LastUse {
 public:
  /// The last use so far is the last thing that was issued on the current stream.
  void note(const at::Tensor& memory);
  /// The next use will be on the current stream: if that is another one, it waits for the last use.
  void await(const at::Tensor& memory);
  /// The next use will be by the host, which waits for the last one.
  void make_host_wait() const;
  /// The memory is about to go back to its allocator, which must not hand it out before the last use is over.
  void tell_allocator(const at::Tensor& memory) const;
  /// Whether it was captured into a graph.
  bool captured() const {
    return capture_ != 0;
  }

 private:
  std::optional<c10::Stream> stream_;
  uint64_t capture_ = 0;
  std::optional<c10::Event> event_;
};

} // namespace shardwise::comm
