#pragma once

#include "base/gate.h"
#include "stream.h"

#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

namespace late {

/// Streams of a device wait for it, and the host opens it: what the direct transport needs of a device.
class Gate final : public shardwise::base::Gate {
 public:
  explicit Gate(c10::Device device) : device_(device) {}

  void hold(const c10::Stream& stream, uint32_t number) override;
  void open(uint32_t number) noexcept override;

 private:
  const c10::Device device_;
  std::mutex mutex_;
  uint32_t opened_ = 0;
  std::multimap<uint32_t, std::shared_ptr<Completion>> waiting_;
};

} // namespace late
