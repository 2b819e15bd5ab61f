#pragma once

#include <shardwise/counters.h>
#include <shardwise/export.h>
#include <shardwise/plan.h>

#include <memory>
#include <string>

namespace torch::nn {
class Module;
}

namespace shardwise {

namespace engine {
class Unit;
}

/// A handle on one replicate() call: cheap to copy. It keeps no parameter alive.
class SHARDWISE_API Unit {
 public:
  explicit Unit(std::shared_ptr<engine::Unit> unit);

  /// The name of the module in the module that was wrapped around it; "" for the outermost.
  const std::string& name() const;

  /// Whether backward averages gradients over the ranks (it does by default). While it is off, gradients are summed
  /// up out of sight, and the next backward with it on averages the sum. Read once a backward, at its end.
  Unit& set_requires_gradient_sync(bool value, bool recurse = true);
  bool requires_gradient_sync() const;

  Plan plan() const;
  Counters counters() const;

 private:
  std::shared_ptr<engine::Unit> unit_;
};

/// The handle of a module that replicate() was called on. Raises ValueError for any other.
SHARDWISE_API Unit unit(const torch::nn::Module& module);

} // namespace shardwise
