#pragma once

#include <c10/core/Stream.h>

#include <cstdint>

namespace shardwise::base {

/// Lets the streams of a device wait for the host, which no part of torch does for all kinds of devices. Numbers grow.
class Gate {
 public:
  Gate() = default;
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  virtual ~Gate() = default;

  /// What the stream gets from now on runs once the gate was opened with this number or a later one.
  virtual void hold(const c10::Stream& stream, uint32_t number) = 0;
  virtual void open(uint32_t number) noexcept = 0;
};

} // namespace shardwise::base
