#pragma once

#include "engine/unit.h"
#include "group/front.h"
#include "nn/touch.h"

#include <memory>

namespace shardwise::nn {

/// Tells a unit of every use of its full copies, and of every write to its shards, by the touch trigger.
class UnitTouch : public group::Front {
 public:
  UnitTouch();
  /// The unit that is told; it keeps this. Its buffers are never cast.
  void bind(const std::shared_ptr<engine::Unit>& unit, const std::vector<engine::NamedTensor>& buffers);
  /// A call of the unit's module that can be seen begins or ends. Inside of one nothing is cast operation by operation:
  /// its inputs were.
  void begin_call();
  void end_call();

  void mark(const at::Tensor& tensor) override;
  std::shared_ptr<void> watch(const at::Tensor& tensor, Role role) override;

 private:
  class Full;
  class Shard;
  std::shared_ptr<Full> full_;
  std::shared_ptr<Shard> shard_;
};

} // namespace shardwise::nn
