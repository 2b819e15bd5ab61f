#pragma once

#include <shardwise/export.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <set>

namespace shardwise::engine {

class Schedule;
class Unit;

/// The backward of the unit's module begins where the first gradient of an output is there; that of an inner module may
/// have begun with the same tensor.
SHARDWISE_API void begin_backward_at(const at::Tensor& output, const std::weak_ptr<Unit>& unit);

/// One backward and the unit trees that it comes to. Its end ends it for each of them, in an order that all ranks share
/// (that in which the trees were made), whatever the order in which gradients arrived.
/// A backward that dies never reaches its end; the watch notices that too and makes the trees forget it.
class BackwardWatch {
 public:
  /// Whether a backward runs on this thread.
  static bool running();
  /// The watch of the backward that runs on this thread.
  static std::shared_ptr<BackwardWatch> current();

  /// The backward comes to the tree.
  void arriving(const std::shared_ptr<Schedule>& tree);
  /// It brought a gradient.
  void arrived(const std::shared_ptr<Schedule>& tree);

  ~BackwardWatch();
  BackwardWatch(const BackwardWatch&) = delete;
  BackwardWatch& operator=(const BackwardWatch&) = delete;

 private:
  explicit BackwardWatch(int backward);
  void end();

  struct ByNumber {
    bool operator()(const std::shared_ptr<Schedule>& a, const std::shared_ptr<Schedule>& b) const;
  };
  int backward_;
  std::set<std::shared_ptr<Schedule>, ByNumber> touched_;
  std::set<std::shared_ptr<Schedule>, ByNumber> reached_;
};

} // namespace shardwise::engine
