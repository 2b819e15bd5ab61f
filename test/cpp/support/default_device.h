#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace shardwise::test {

/// While one lives, whatever this thread makes without naming a device is made on this one, as torch.set_default_device
/// has it in Python. Numbers that are drawn from a generator of the CPU are the same as there. Backwards that begin
/// here go by it too.
class DefaultDevice {
 public:
  explicit DefaultDevice(c10::Device device);
  ~DefaultDevice();
  DefaultDevice(const DefaultDevice&) = delete;
  DefaultDevice& operator=(const DefaultDevice&) = delete;

 private:
  c10::Device before_;
  c10::impl::IncludeDispatchKeyGuard mode_;
};

} // namespace shardwise::test
