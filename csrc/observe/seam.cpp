#include "observe/seam.h"

#include <memory>
#include <mutex>

namespace shardwise::observe {
namespace {

struct Slot {
  std::mutex mutex;
  std::shared_ptr<const SeamHook> hook;

  static Slot& get() {
    static auto* slot = new Slot;
    return *slot;
  }
};

} // namespace

std::atomic<bool> has_seam_hook = false;

void set_seam_hook(SeamHook hook) {
  auto& slot = Slot::get();
  const std::lock_guard lock(slot.mutex);
  slot.hook = hook ? std::make_shared<const SeamHook>(std::move(hook)) : nullptr;
  has_seam_hook.store(slot.hook != nullptr, std::memory_order_relaxed);
}

void call_seam_hook(Seam seam) {
  auto& slot = Slot::get();
  std::shared_ptr<const SeamHook> hook;
  {
    const std::lock_guard lock(slot.mutex);
    hook = slot.hook;
  }
  if (hook) (*hook)(seam);
}

} // namespace shardwise::observe
