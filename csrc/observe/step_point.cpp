#include "observe/step_point.h"

#include <memory>
#include <mutex>

namespace shardwise::observe {
namespace {

struct Slot {
  std::mutex mutex;
  std::shared_ptr<const StepPointHook> hook;

  static Slot& get() {
    static auto* slot = new Slot;
    return *slot;
  }
};

} // namespace

std::atomic<bool> has_step_point_hook = false;

void set_step_point_hook(StepPointHook hook) {
  auto& slot = Slot::get();
  const std::lock_guard lock(slot.mutex);
  slot.hook = hook ? std::make_shared<const StepPointHook>(std::move(hook)) : nullptr;
  has_step_point_hook.store(slot.hook != nullptr, std::memory_order_relaxed);
}

void call_step_point_hook(StepPoint point) {
  auto& slot = Slot::get();
  std::shared_ptr<const StepPointHook> hook;
  {
    const std::lock_guard lock(slot.mutex);
    hook = slot.hook;
  }
  if (hook) (*hook)(point);
}

} // namespace shardwise::observe
