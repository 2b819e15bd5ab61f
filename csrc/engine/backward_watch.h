#pragma once

#include <memory>
#include <set>

namespace shardwise::engine {

class Unit;

/// One backward and the unit trees that it brings gradients to. Its end averages them, in an order that all ranks share
/// (that in which the trees were made), whatever the order in which gradients arrived.
/// A backward that dies never reaches its end; the watch notices that too and makes the trees forget it.
class BackwardWatch {
 public:
  /// The watch of the backward that runs on this thread.
  static std::shared_ptr<BackwardWatch> current();

  /// A gradient may come to the tree, or has come.
  void arriving(const std::shared_ptr<Unit>& top);
  void arrived(const std::shared_ptr<Unit>& top);

  ~BackwardWatch();
  BackwardWatch(const BackwardWatch&) = delete;
  BackwardWatch& operator=(const BackwardWatch&) = delete;

 private:
  explicit BackwardWatch(int backward);
  void end();

  struct ByNumber {
    bool operator()(const std::shared_ptr<Unit>& a, const std::shared_ptr<Unit>& b) const;
  };
  int backward_;
  std::set<std::shared_ptr<Unit>, ByNumber> touched_;
  std::set<std::shared_ptr<Unit>, ByNumber> reached_;
};

} // namespace shardwise::engine
