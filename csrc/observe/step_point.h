#pragma once

#include <shardwise/detail/export.h>

#include <atomic>
#include <functional>

namespace shardwise::observe {

/// Points in a step at which this rank meets the others, or hands over to the user.
enum class StepPoint {
  /// Before an all-gather is started.
  unshard,
  /// Before waiting for an all-gather and copying its result out.
  copy_out,
  /// Before the sum of a unit's gradients is started.
  reduce,
  /// Before the sum over ranks with copies of the same shard is started; it is the unit's only sum or its second.
  all_reduce,
  /// Before waiting for a sum.
  reduced,
  /// Before a unit's means reach .grad.
  publish,
};

using StepPointHook = std::function<void(StepPoint)>;

/// For tests: `hook` is called at every point, on the thread that passes it, so that a test can delay a rank there, or
/// throw. An empty hook ends that, though calls on other threads may still be running. Thread safe.
SHARDWISE_API void set_step_point_hook(StepPointHook hook);

extern std::atomic<bool> has_step_point_hook;
void call_step_point_hook(StepPoint point);

/// Costs one relaxed load when there is no hook.
inline void pass(StepPoint point) {
  if (has_step_point_hook.load(std::memory_order_relaxed)) call_step_point_hook(point);
}

} // namespace shardwise::observe
