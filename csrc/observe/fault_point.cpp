#include "observe/fault_point.h"

#include <memory>
#include <mutex>

namespace shardwise::observe {
namespace {

struct Slot {
  std::mutex mutex;
  std::shared_ptr<const FaultPointHook> hook;

  static Slot& get() {
    static auto* slot = new Slot;
    return *slot;
  }
};

} // namespace

std::atomic<bool> has_fault_point_hook = false;

void set_fault_point_hook(FaultPointHook hook) {
  auto& slot = Slot::get();
  const std::lock_guard lock(slot.mutex);
  slot.hook = hook ? std::make_shared<const FaultPointHook>(std::move(hook)) : nullptr;
  has_fault_point_hook.store(slot.hook != nullptr, std::memory_order_relaxed);
}

void call_seam_hook(FaultPoint point) {
  auto& slot = Slot::get();
  std::shared_ptr<const FaultPointHook> hook;
  {
    const std::lock_guard lock(slot.mutex);
    hook = slot.hook;
  }
  if (hook) (*hook)(point);
}

} // namespace shardwise::observe
