#pragma once

#include <shardwise/detail/export.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <set>

namespace shardwise::engine {

class Schedule;
class Unit;

/// Enters the unit in backward once `output`, an output of its module, has its gradient. Inner units that the same
/// tensor entered stay open.
SHARDWISE_API void begin_backward_at(const at::Tensor& output, const std::weak_ptr<Unit>& unit);

/// One backward, and the trees of units that it reaches. When it ends, the watch ends it for each tree in the order in
/// which the trees were made: that is the same on all ranks, while the order in which gradients arrive may differ. A
/// backward that throws never reaches its end. The watch is destroyed then, and makes the trees forget the backward. On
/// a device, either an autograd thread or the program's may destroy it, so the trees always forget it at their next
/// use. A backward inside another one that reaches a tree first ends there like any other. Only the post-accumulate
/// hooks wait for the end of the outermost, which may still bring gradients to the same parameters, or read them.
class BackwardWatch {
 public:
  /// Whether a backward is running on this thread.
  SHARDWISE_API static bool running();
  /// The watch of the backward that is running on this thread.
  static std::shared_ptr<BackwardWatch> current();

  /// The backward reaches this tree.
  void arriving(const std::shared_ptr<Schedule>& tree);
  /// The backward brought this tree a gradient.
  void arrived(const std::shared_ptr<Schedule>& tree);

  ~BackwardWatch();
  BackwardWatch(const BackwardWatch&) = delete;
  BackwardWatch& operator=(const BackwardWatch&) = delete;

 private:
  explicit BackwardWatch(int backward);
  void end();
  void take_over_hooks(BackwardWatch& inner);

  struct ByNumber {
    bool operator()(const std::shared_ptr<Schedule>& a, const std::shared_ptr<Schedule>& b) const;
  };
  int backward_;
  std::set<std::shared_ptr<Schedule>, ByNumber> touched_;
  std::set<std::shared_ptr<Schedule>, ByNumber> reached_;
  /// Trees whose hooks wait for the end of the outermost backward.
  std::set<std::shared_ptr<Schedule>, ByNumber> hooked_;
  bool ended_ = false;
};

} // namespace shardwise::engine
