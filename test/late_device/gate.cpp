#include "gate.h"

#include "device.h"
#include "pinned.h"

namespace late {

void Gate::hold(const c10::Stream& stream, uint32_t number) {
  const std::lock_guard lock(mutex_);
  if (number <= opened_) return;
  auto completion = std::make_shared<Completion>();
  waiting_.emplace(number, completion);
  Device::of(device_).wait_for_host(stream.id(), std::move(completion));
}

void Gate::open(uint32_t number) noexcept {
  const auto now = Device::of(device_).host_time();
  const std::lock_guard lock(mutex_);
  opened_ = std::max(opened_, number);
  const auto end = waiting_.upper_bound(number);
  for (auto each = waiting_.begin(); each != end; ++each) {
    each->second->finish(now);
    gate_opened();
  }
  waiting_.erase(waiting_.begin(), end);
}

} // namespace late
