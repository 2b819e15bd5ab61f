#pragma once

#include <shardwise/export.h>

#include <atomic>
#include <functional>

namespace shardwise::observe {

/// Places of a step where this rank meets the others, or hands over to the user.
enum class FaultPoint {
  /// Before an all-gather is started.
  unshard,
  /// Before an all-gather is waited for, and copied out.
  copy_out,
  /// Before the sum of a unit's gradients is started.
  reduce,
  /// Before its sum over the ranks that hold copies is started: the only one, or the second.
  all_reduce,
  /// Before a sum is waited for.
  reduced,
  /// Before a unit's means reach .grad.
  publish,
};

using FaultPointHook = std::function<void(FaultPoint)>;

/// For tests: `hook` is called at every point, on the thread that passes it, so that tests can delay one rank there. An
/// empty one ends that; calls under way on other threads still end. Thread safe.
SHARDWISE_API void set_fault_point_hook(FaultPointHook hook);

extern std::atomic<bool> has_fault_point_hook;
void call_seam_hook(FaultPoint point);

/// Costs one relaxed load when there is no hook.
inline void pass(FaultPoint point) {
  if (has_fault_point_hook.load(std::memory_order_relaxed)) call_seam_hook(point);
}

} // namespace shardwise::observe
